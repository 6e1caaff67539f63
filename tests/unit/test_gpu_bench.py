"""What the GPU's bench says where there is none, and that its mixer finds a row that depends on its company."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from loadgen.gpu_bench import NO_GPU, main
from loadgen.gpu_mixer import mix
from shared.engine.batch import SequenceRows
from tests.unit.engine_harness import load_runner, tiny_model


def test_without_a_gpu_one_line_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    figures = tmp_path / "figures.json"
    assert main(["--json", str(figures)]) == NO_GPU == 2
    out, err = capsys.readouterr()
    assert out == "bench-gpu: nothing was run: torch sees no CUDA device\n"
    assert err == ""
    assert not figures.exists()


def test_the_mixer_compares_every_kind_of_row_and_finds_one_that_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load_runner(tiny_model(tmp_path), "fp32")
    rng = random.Random(2)
    texts = [[rng.randrange(runner.model.vocab_size) for _ in range(n)] for n in (1, 33, 90)]
    mixed = mix(runner, texts, rounds=3, seed=4, most_rows=256)
    assert mixed.differing == 0
    assert mixed.rows > 100
    assert mixed.tokens == 3 * sum(len(text) for text in texts)
    exact = runner.forward

    def spoilt(sequences: list[SequenceRows]) -> Any:
        logits = exact(sequences)
        if len(sequences) > 1 and len(logits):
            logits[0, 0] *= 1.0001
        return logits

    monkeypatch.setattr(runner, "forward", spoilt)
    assert mix(runner, texts, rounds=3, seed=4, most_rows=256).differing > 0
