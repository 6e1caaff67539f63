"""What is measured, loaded at first use and kept: the engine with each kind of weights, and Transformers."""

from __future__ import annotations

from functools import cached_property
from importlib.resources import files as package_files

import torch

from loadgen.engine_bench.transformers_peer import TransformersPeer
from shared.engine import Engine, EngineConfig
from shared.engine.config import Dtype
from shared.engine.runner import ModelRunner
from shared.models import resolve_model
from shared.models.tokenizer import ChatTokenizer

PACKED: tuple[Dtype, ...] = ("fp16-packed", "int8")
"""What the engine is meant to run with on CPU."""


class Subjects:
    """Owner of the loaded models. Every part of the benchmark measures the same ones."""

    def __init__(self, model: str, threads: int, kv_bytes: int) -> None:
        """`model` is a name that `resolve_model` takes. Raises ModelNotFound, ModelUnusable."""
        torch.set_num_threads(threads)
        self.model = model
        self.files = resolve_model(model)
        self.threads = threads
        self.kv_bytes = kv_bytes
        self._runners: dict[Dtype, ModelRunner] = {}

    def config(self, dtype: Dtype) -> EngineConfig:
        return EngineConfig(
            model_path=self.files.path,
            model_name=self.files.name,
            fingerprint=self.files.fingerprint,
            kv_memory_bytes=self.kv_bytes,
            dtype=dtype,
            threads=self.threads,
        )

    def runner(self, dtype: Dtype) -> ModelRunner:
        """Raises EngineError."""
        if dtype not in self._runners:
            self._runners[dtype] = ModelRunner.load(self.config(dtype))
        return self._runners[dtype]

    def engine(self, dtype: Dtype) -> Engine:
        """A new one on the loaded model, so that no earlier prompt is cached."""
        return Engine(self.config(dtype), self.runner(dtype), self.tokenizer.raw)

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        return ChatTokenizer.load(self.files.path)

    @cached_property
    def transformers(self) -> TransformersPeer:
        return TransformersPeer(self.files.path)

    @cached_property
    def prose(self) -> list[int]:
        """Token ids of the text that stands beside this module."""
        text = package_files(__package__).joinpath("prose.txt").read_text(encoding="utf-8")
        return self.tokenizer.encode(text)
