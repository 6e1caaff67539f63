"""Plain Transformers in fp32 as a peer: its own modules, attention and cache, with nothing of the engine in it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from loadgen.engine_bench.timing import Contender

AttentionName = Literal["sdpa", "eager"]
ATTENTIONS: tuple[AttentionName, ...] = ("sdpa", "eager")


class TransformersPeer:
    def __init__(self, path: Path) -> None:
        transformers.utils.logging.disable_progress_bar()
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
        ).eval()

    def step(self, attention: AttentionName, batch: int, context: list[int]) -> Contender:
        """A decode step of `batch` sequences behind `context`, each on its copy of the cache."""
        past = self._cache_of(context, batch)
        token = torch.full((batch, 1), context[-1])

        def before() -> None:
            self.model.set_attn_implementation(attention)
            if past.get_seq_length() > len(context):
                past.crop(-1)

        @torch.inference_mode()
        def run() -> None:
            self.model(input_ids=token, cache=past, use_cache=True)

        return Contender(run, before)

    def prefill(self, attention: AttentionName, ids: list[int]) -> Contender:
        """A whole prompt in one forward; only its last row goes through the head."""
        batch = torch.tensor([ids])

        @torch.inference_mode()
        def run() -> None:
            past = DynamicCache(config=self.model.config)
            self.model(input_ids=batch, cache=past, use_cache=True, logits_to_keep=1)

        return Contender(run, lambda: self.model.set_attn_implementation(attention))

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """[len(ids), vocabulary]"""
        self.model.set_attn_implementation("sdpa")
        return self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]  # type: ignore[no-any-return]

    def generate(self, ids: list[int], new_tokens: int) -> list[float]:
        """Times of arrival, on the `perf_counter` clock, of `new_tokens` greedy ones."""
        self.model.set_attn_implementation("sdpa")
        prompt = torch.tensor([ids])
        arrivals = _Arrivals()
        self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            streamer=arrivals,
        )
        return arrivals.times_s[1:]

    @torch.inference_mode()
    def _cache_of(self, context: list[int], batch: int) -> Any:
        past = DynamicCache(config=self.model.config)
        self.model(input_ids=torch.tensor([context]), cache=past, use_cache=True, logits_to_keep=1)
        past.batch_repeat_interleave(batch)
        return past


class _Arrivals:
    """A streamer of `generate`. It is handed the prompt first, then each token."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, value: Any) -> None:
        self.times_s.append(time.perf_counter())

    def end(self) -> None:
        pass
