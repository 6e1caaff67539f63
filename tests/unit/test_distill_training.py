"""Training that is interrupted anywhere ends with the student that it would have made undisturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.draft.distill.corpus import Text
from services.draft.distill.training import Trainer
from tests.unit.distill_harness import chat_target, texts_to_learn, trainer

WEIGHTS = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    return texts_to_learn()


def trained(made: Trainer) -> WEIGHTS:
    made.run(lambda progress: None)
    assert made.state.step == made.steps > 5
    return {name: parameter.detach().cpu().clone() for name, parameter in made._student.trained.items()}


def interrupt(made: Trainer, monkeypatch: pytest.MonkeyPatch, step: int, *, behind: bool) -> None:
    """Ctrl-C in the optimiser's step `step`, before it has changed the weights or behind that."""
    really, made_steps = made._optimiser.step, [0]

    def strike(*args: Any) -> Any:
        made_steps[0] += 1
        if made_steps[0] != step:
            return really(*args)
        if behind:
            really(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(made._optimiser, "step", strike)
    with pytest.raises(KeyboardInterrupt):
        made.run(lambda progress: None)


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("checkpoint_s", [0.0, 3600.0])
def test_ctrl_c_in_a_step_makes_no_step_twice(
    tmp_path: Path,
    target: Path,
    texts: list[Text],
    monkeypatch: pytest.MonkeyPatch,
    behind: bool,
    checkpoint_s: float,
) -> None:
    monkeypatch.setattr("services.draft.distill.training.CHECKPOINT_S", checkpoint_s)
    undisturbed = trained(trainer(target, texts, tmp_path / "undisturbed"))
    interrupt(trainer(target, texts, tmp_path / "struck"), monkeypatch, 4, behind=behind)
    again = trainer(target, texts, tmp_path / "struck")
    assert again.state.step == (3 if checkpoint_s == 0 else 0)
    same(trained(again), undisturbed)


def test_ctrl_c_between_two_steps_loses_neither(
    tmp_path: Path, target: Path, texts: list[Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = trained(trainer(target, texts, tmp_path / "undisturbed"))
    struck = trainer(target, texts, tmp_path / "struck")

    def strike(progress: Any) -> None:
        if progress.step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        struck.run(strike)
    again = trainer(target, texts, tmp_path / "struck")
    assert again.state.step == 4
    same(trained(again), undisturbed)


def same(found: WEIGHTS, expected: WEIGHTS) -> None:
    assert found.keys() == expected.keys()
    for name, weights in expected.items():
        assert torch.equal(found[name], weights), name
