"""What a drafter would be worth: against drafting token by token, and by both ways of measuring."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.draft.distill.acceptance import DRAFTED, Acceptance, Accepted, Tally, of_draft, of_student
from services.draft.distill.corpus import Text, WrittenTurn
from services.draft.distill.errors import DistillError
from services.draft.distill.result import write_model
from services.draft.distill.student import make_student
from shared.engine import Engine
from tests.unit.distill_harness import chat_target, written
from tests.unit.engine_harness import begin, drain, load, sampled


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_the_mean_is_what_drafting_round_by_round_gives(guesses: list[bool]) -> None:
    at = rounds = accepted = 0
    while at < len(guesses):
        rounds += 1
        drafted = 0
        while drafted < DRAFTED and at < len(guesses) and guesses[at]:
            at, drafted, accepted = at + 1, drafted + 1, accepted + 1
        at += 1  # the token that the target itself gives
    tally = Tally()
    tally.add(guesses)
    assert tally.result() == Acceptance(len(guesses), sum(guesses) / len(guesses), accepted / rounds)


def written_by(engine: Engine, temperatures: Sequence[float]) -> list[Text]:
    """Texts of one answer each, by the engine's model."""
    texts = []
    for number, temperature in enumerate(temperatures):
        prompt = [(number * 31 + i * 7) % 200 for i in range(5 + number)]
        params = sampled(40, temperature=temperature, top_p=1.0, seed=900 + number)
        sequence = begin(engine, f"t{number}", prompt, params)
        drain(engine)
        tokens = np.array(sequence.token_ids, np.int32)
        turn = WrittenTurn("answer", len(prompt), len(tokens), temperature, 900 + number)
        made = np.arange(len(tokens)) >= len(prompt)
        ids, logprobs = np.zeros((40, 1), np.int32), np.zeros((40, 1), np.float16)
        texts.append(Text(number, tokens, made, ids, logprobs, (turn,)))
        engine.release(f"t{number}")
    return texts


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def texts(target: Path) -> list[Text]:
    return written_by(load(target), [0.0, 0.7, 1.0, 0.0, 1.0])


def test_the_target_accepts_all_of_itself(target: Path, texts: list[Text]) -> None:
    found = of_draft(load(target), texts, 1000)
    assert found == Accepted(Acceptance(80, 1.0, DRAFTED), Acceptance(120, 1.0, DRAFTED))


def test_a_student_is_worth_the_same_in_training_and_in_the_engine(
    tmp_path: Path, target: Path, texts: list[Text]
) -> None:
    student = make_student(target, [0, 3])
    for parameter in student.trained.values():
        parameter.data = parameter.data.half().float()
    write_model(student, target, tmp_path, [], written())
    found = of_draft(load(tmp_path), texts, 1000)
    assert found == of_student(student, texts, 1000)
    assert 0 < found.greedy.share < 1
    assert found.sampled.positions == 120


def test_a_draft_whose_numbers_overflow_is_told_and_not_measured_for_ever(
    tmp_path: Path, target: Path, texts: list[Text]
) -> None:
    student = make_student(target, [0, 3])
    for parameter in student.trained.values():
        parameter.data = torch.full_like(parameter, float("nan"))
    write_model(student, target, tmp_path, [], written())
    engine = load(tmp_path)
    with pytest.raises(DistillError, match="failed while it was measured"):
        of_draft(engine, texts, 1000)


def test_measuring_stops_at_its_limit_for_each_kind(target: Path, texts: list[Text]) -> None:
    found = of_draft(load(target), texts, 41)
    assert (found.greedy.positions, found.sampled.positions) == (80, 80)
    assert of_draft(load(target), [], 41) == Accepted(Acceptance(), Acceptance())
