"""The engine on a CUDA device: every bit in every company, through graphs and without, and blocks as UCX takes them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loadgen.gpu_mixer import mix
from shared.blocks import checksum
from shared.engine import Engine, EngineConfig
from shared.engine.batch import SequenceRows
from shared.engine.runner import ModelRunner
from shared.transport import is_device, n_bytes
from tests.unit.engine_harness import CONFIGS, begin, drain, greedy, outputs, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

SIZES = {"hidden_size": 96, "intermediate_size": 256, "max_position_embeddings": 2048}


def config(path: Path, **changes: Any) -> EngineConfig:
    fields: dict[str, Any] = {
        "model_path": path,
        "model_name": "tiny",
        "fingerprint": "f",
        "kv_memory_bytes": 64 << 20,
        "device": "cuda",
        "dtype": "bf16",
        "block_tokens": 16,
        "max_batch_tokens": 512,
    }
    return EngineConfig(**fields | changes)


def texts(runner: ModelRunner, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(runner.model.vocab_size) for _ in range(n)] for n in lengths]


@pytest.mark.parametrize("kind", sorted(CONFIGS))
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_row_has_the_same_bits_in_every_company(tmp_path: Path, kind: str, dtype: str) -> None:
    runner = ModelRunner.load(config(tiny_model(tmp_path, kind, **SIZES), dtype=dtype))
    mixed = mix(runner, texts(runner, (1, 40, 129, 700)), rounds=2, seed=3, most_rows=512)
    assert mixed.differing == 0
    assert mixed.rows > 300


@pytest.mark.parametrize("attention", ["triton", "torch"])
def test_each_attention_serves_and_both_agree_with_the_cpu(tmp_path: Path, attention: str) -> None:
    path = tiny_model(tmp_path, **SIZES)
    runner = ModelRunner.load(config(path, dtype="fp32", attention=attention))
    host = ModelRunner.load(config(path, dtype="fp32", device="cpu", kv_memory_bytes=16 << 20))
    assert runner.attention_name == attention
    rows = [SequenceRows(texts(host, (600,))[0], 0, list(range(38)), 600)]
    np.testing.assert_allclose(runner.forward(rows), host.forward(rows), rtol=0, atol=2e-3)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine.load(config(tiny_model(tmp_path, **SIZES)))


def test_decode_runs_in_graphs_and_gives_what_it_gives_without(engine: Engine, tmp_path: Path) -> None:
    eager = Engine.load(config(tmp_path, cuda_graphs=False))
    found = []
    for each in (engine, eager):
        for i in range(5):
            begin(each, f"s{i}", [3 + i, 5, 8] * (i + 1), greedy(40))
        found.append(outputs(drain(each)))
    assert found[0] == found[1]
    assert engine._runner.graph_rows
    assert not eager._runner.graph_rows
    assert engine.layout == eager.layout


def test_a_block_is_handed_out_where_it_lies_and_hashed_through_the_host(engine: Engine) -> None:
    sequence = engine.new_sequence("a", [1] * 40, 40, greedy(1))
    engine.admit(sequence)
    first, second = (engine.block_buffer(block_id) for block_id in sequence.block_ids[:2])
    assert is_device(first)
    assert n_bytes(first) == engine.layout.block_bytes
    data = torch.randint(0, 256, (n_bytes(first),), dtype=torch.uint8)
    first.copy_(data)
    second.copy_(first)
    assert checksum(first) == checksum(second) == checksum(data.numpy())


def test_fast_mode_serves_and_keeps_its_blocks_to_itself(engine: Engine, tmp_path: Path) -> None:
    fast = Engine.load(config(tmp_path, exactness="fast"))
    begin(fast, "a", [5, 6, 7], greedy(20))
    assert len(outputs(drain(fast))["a"]) == 20
    assert fast.layout.layout_id != engine.layout.layout_id
