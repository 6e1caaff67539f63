"""Distillation on a CUDA device goes on from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.distill_harness import chat_target, texts_to_learn, trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    target, texts = chat_target(tmp_path / "target"), texts_to_learn()
    struck = trainer(target, texts, tmp_path / "checkpoint", "cuda")

    def strike(progress: Any) -> None:
        if progress.step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        struck.run(strike)
    again = trainer(target, texts, tmp_path / "checkpoint", "cuda")
    assert again.state.step == 4
    again.run(lambda progress: None)
    undisturbed = trainer(target, texts, tmp_path / "undisturbed", "cuda")
    undisturbed.run(lambda progress: None)
    found, expected = ({n: p.detach() for n, p in t._student.trained.items()} for t in (again, undisturbed))
    for name, weights in expected.items():
        assert torch.allclose(found[name], weights, rtol=1e-3, atol=1e-4), name
