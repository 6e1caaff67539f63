"""Tiny, randomly initialised models on disk for the engine's tests: no download, milliseconds a step."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from shared.engine import Engine, EngineConfig, Sequence, SequenceStep
from shared.protocol.jobs import SamplingParams

CONFIGS = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "mistral": transformers.MistralConfig,
    "gemma2": transformers.Gemma2Config,
    "phi3": transformers.Phi3Config,
    "olmo2": transformers.Olmo2Config,
    "gpt_neox": transformers.GPTNeoXConfig,
    "gpt2": transformers.GPT2Config,
}

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
    if kind in ("gemma2", "qwen3"):
        fields["head_dim"] = 8
    if kind in ("gpt2", "gpt_neox"):
        del fields["num_key_value_heads"]
    torch.manual_seed(7)
    config = CONFIGS[kind](**fields | changes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def load(path: Path, **changes: Any) -> Engine:
    fields: dict[str, Any] = {
        "model_path": path,
        "model_name": "tiny",
        "fingerprint": "f",
        "kv_memory_bytes": 4 << 20,
        "dtype": "fp32",
        "block_tokens": 16,
        "max_batch_tokens": 128,
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
