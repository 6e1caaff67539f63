"""Tiny, randomly initialised models on disk for the engine's tests: no download, milliseconds a step."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from shared.engine import Engine, EngineConfig, Sequence, SequenceStep
from shared.engine.batch import SequenceRows
from shared.engine.runner import ModelRunner
from shared.protocol.jobs import SamplingParams

CONFIGS = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "mistral": transformers.MistralConfig,
    "gemma": transformers.GemmaConfig,
    "helium": transformers.HeliumConfig,
    "ernie4_5": transformers.Ernie4_5Config,
    "smollm3": transformers.SmolLM3Config,
    "gemma2": transformers.Gemma2Config,
    "gemma3": transformers.Gemma3TextConfig,
    "phi3": transformers.Phi3Config,
    "olmo2": transformers.Olmo2Config,
    "gpt_neox": transformers.GPTNeoXConfig,
    "gpt2": transformers.GPT2Config,
    "mixtral": transformers.MixtralConfig,
    "qwen2_moe": transformers.Qwen2MoeConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "olmoe": transformers.OlmoeConfig,
}

_SPECIAL: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 8},
    "gemma": {"head_dim": 8},
    "helium": {"head_dim": 8},
    "ernie4_5": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 11},
    "gemma3": {"head_dim": 8, "query_pre_attn_scalar": 11, "layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 37}
    | {"shared_expert_intermediate_size": 51, "norm_topk_prob": False},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 37, "head_dim": 8}
    | {"norm_topk_prob": True},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3},
}
"""Fields of single kinds, beside those that `tiny_model` gives to all."""

EOS = "<|end|>"


@cache
def byte_level_tokenizer() -> Tokenizer:
    """One token for each byte, some for pairs, so that characters and stop strings split across tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("S", "T"), ("O", "P"), ("ST", "OP"), ("Ġ", "a")]
    vocab = {c: i for i, c in enumerate(alphabet)}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    return tokenizer


def tiny_model(path: Path, kind: str = "llama", **changes: Any) -> Path:
    """Save a model of two layers with odd sizes, which leave remainders in every kernel. Returns `path`."""
    tokenizer = byte_level_tokenizer()
    fields: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 48,
        "intermediate_size": 101,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.15,
        "eos_token_id": tokenizer.token_to_id(EOS),
        "bos_token_id": None,
        "pad_token_id": None,
    }
    fields |= _SPECIAL.get(kind, {})
    if kind in ("gpt2", "gpt_neox"):
        del fields["num_key_value_heads"]
    torch.manual_seed(7)
    config = CONFIGS[kind](**fields | changes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def load(path: Path, **changes: Any) -> Engine:
    """Unless asked for otherwise every draft that fits is verified, so that steps do not depend on the clock."""
    fields: dict[str, Any] = {
        "model_path": path,
        "model_name": "tiny",
        "fingerprint": "f",
        "kv_memory_bytes": 4 << 20,
        "dtype": "fp32",
        "block_tokens": 16,
        "max_batch_tokens": 128,
        "adaptive_drafts": False,
    }
    return Engine.load(EngineConfig(**fields | changes))


def greedy(max_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "seed": 1, "temperature": 0.0, "ignore_eos": True} | changes)


def sampled(max_tokens: int, **changes: Any) -> SamplingParams:
    return greedy(max_tokens, **{"temperature": 1.0, "top_p": 0.95} | changes)


def begin(engine: Engine, seq_id: str, prompt: list[int], params: SamplingParams, **options: Any) -> Sequence:
    sequence = engine.new_sequence(seq_id, prompt, len(prompt), params, **options)
    engine.start(sequence)
    return sequence


def drain(engine: Engine, most: int = 5_000) -> list[SequenceStep]:
    """Step until nothing is left to do."""
    steps: list[SequenceStep] = []
    for _ in range(most):
        if not engine.has_work:
            return steps
        steps += engine.step()
    raise AssertionError(f"still at work after {most} steps")


def outputs(steps: list[SequenceStep]) -> dict[str, list[int]]:
    """Output ids by sequence; fails on a gap or an overlap."""
    found: dict[str, list[int]] = {}
    for step in steps:
        ids = found.setdefault(step.seq_id, [])
        if step.new_ids:
            assert step.first_index == len(ids)
            ids += step.new_ids
    return found


def texts(steps: list[SequenceStep]) -> dict[str, str]:
    found: dict[str, str] = {}
    for step in steps:
        found[step.seq_id] = found.get(step.seq_id, "") + step.text
    return found


def load_runner(
    path: Path,
    dtype: str,
    *,
    block_tokens: int = 16,
    threads: int = 1,
    kv_memory_bytes: int = 8 << 20,
    attention: str = "auto",
) -> ModelRunner:
    return ModelRunner.load(
        EngineConfig(
            model_path=path,
            model_name="m",
            fingerprint="f",
            kv_memory_bytes=kv_memory_bytes,
            dtype=dtype,  # type: ignore[arg-type]
            block_tokens=block_tokens,
            threads=threads,
            attention=attention,  # type: ignore[arg-type]
        )
    )


def kv_of(model: ModelRunner, block_ids: list[int], tokens: int) -> NDArray[np.float32]:
    """[tokens, 2, layers, kv_heads, head_dim], whatever the blocks."""
    blocks = model.cache.data[torch.tensor(block_ids)].permute(0, 3, 1, 2, 4, 5)
    return blocks.reshape(-1, *blocks.shape[2:])[:tokens].numpy()


class Mixer:
    """Feeds several texts to one runner, first each whole and alone, then in a random mix; compares every bit."""

    def __init__(self, model: ModelRunner, seed: int, lengths: list[int]) -> None:
        self.rng = random.Random(seed)
        self.model = model
        self.block_tokens = model.layout.block_tokens
        self.texts = [[self.rng.randrange(model.model.vocab_size) for _ in range(n)] for n in lengths]
        self.expected = []
        for text in self.texts:
            blocks = list(range(self._blocks(text)))
            logits = model.forward([SequenceRows(text, 0, blocks, len(text))]).copy()
            self.expected.append((logits, kv_of(model, blocks, len(text)).copy()))

    def _blocks(self, text: list[int]) -> int:
        return -(-len(text) // self.block_tokens)

    def run(self) -> int:
        """Returns how many rows of logits were compared."""
        rng, model = self.rng, self.model
        ids = list(range(model.cache.num_blocks))
        rng.shuffle(ids)
        blocks = [[ids.pop() for _ in range(self._blocks(text))] for text in self.texts]
        model.cache.data.fill_(123.0)  # what stands in unwritten rows must not matter
        done = [0] * len(self.texts)
        compared = 0
        while any(n < len(t) for n, t in zip(done, self.texts, strict=True)):
            rows: list[SequenceRows] = []
            parts: list[tuple[int, int]] = []
            room = 256
            for i in rng.sample(range(len(self.texts)), len(self.texts)):
                left = len(self.texts[i]) - done[i]
                count = min(left, room, rng.choice([1, 1, 1, 2, 5, 8, 9, 17, 63, 64, 65, rng.randint(1, 256)]))
                if count < 1 or rng.random() < 0.3:
                    continue
                fed = self.texts[i][done[i] : done[i] + count]
                wrong = [rng.randrange(model.model.vocab_size) for _ in range(rng.choice([0, 0, 1, 4]))]
                wrong = wrong[: max(0, min(left, room) - count)]  # drafts that will be rejected and overwritten
                room -= count + len(wrong)
                wanted = rng.choice([0, 1, min(count, 4), count, count]) + len(wrong)
                rows.append(SequenceRows(fed + wrong, done[i], blocks[i], wanted))
                parts.append((i, len(wrong)))
                done[i] += count
            if not rows:
                continue
            logits = model.forward(rows)
            at = 0
            for row, (i, wrong_count) in zip(rows, parts, strict=True):
                found = logits[at : at + row.num_logits][: max(row.num_logits - wrong_count, 0)]
                at += row.num_logits
                last = row.start + len(row.token_ids) - wrong_count
                expected = self.expected[i][0][last - len(found) : last]
                np.testing.assert_array_equal(found.view(np.int32), expected.view(np.int32))
                compared += len(found)
        for i, text in enumerate(self.texts):
            found_kv = kv_of(model, blocks[i], len(text))
            np.testing.assert_array_equal(found_kv.view(np.int32), self.expected[i][1].view(np.int32))
        return compared
