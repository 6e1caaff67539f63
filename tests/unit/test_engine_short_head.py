"""A head that knows some tokens only: what it says of these is what the whole head says, and the others never come."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shared.engine.batch import SequenceRows
from shared.engine.errors import UnsupportedModel
from shared.engine.runner import ModelRunner
from shared.models import ModelUnusable
from shared.models.drafts import HEAD_TOKENS, read_head_tokens
from shared.protocol.jobs import SamplingParams
from tests.unit.engine_harness import begin, drain, greedy, load, load_runner, outputs, sampled, tiny_model

TOKENS = [(i * 37 + i * i) % 250 for i in range(30)]
KEPT = {
    "some": [7, 3, 250, *range(20, 190, 5), 3],
    "a full block": list(range(100, 164)),
    "few": [41, 7, 200],
    "all": list(range(263)),
}
"""In any order, and twice: the same head."""


def shortened(whole: Path, path: Path, kept: list[int]) -> Path:
    shutil.copytree(whole, path)
    (path / HEAD_TOKENS).write_text(json.dumps(kept))
    return path


def logits_of(runner: ModelRunner) -> list[NDArray[np.float32]]:
    """Of a text in one pass, then of its last tokens as one and as five rows."""
    blocks = list(range(2))
    passes = [SequenceRows(TOKENS, 0, blocks, len(TOKENS)), SequenceRows(TOKENS[-1:], len(TOKENS) - 1, blocks, 1)]
    passes.append(SequenceRows(TOKENS[-5:], len(TOKENS) - 5, blocks, 3))
    return [runner.forward([rows]).copy() for rows in passes]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("whole") / "tiny")


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("dtype", ["fp16-packed", "int8", "fp32"])
def test_logits_of_its_tokens_are_those_of_the_whole_head_and_the_others_have_none(
    whole: Path, tmp_path: Path, dtype: str, kept: str
) -> None:
    check(whole, shortened(whole, tmp_path / "short", KEPT[kept]), dtype, KEPT[kept])


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("gemma2", {"final_logit_softcapping": 1.0}),
        ("gpt2", {}),
        ("gpt_neox", {}),
        ("qwen3", {}),
    ],
)
def test_other_architectures_have_it_too(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    path = tiny_model(tmp_path / "whole", kind, **changes)
    check(path, shortened(path, tmp_path / "short", KEPT["some"]), "fp16-packed", KEPT["some"])


def check(whole: Path, short: Path, dtype: str, kept: list[int]) -> None:
    """To the bit where our own kernels compute; torch's fp32 products sum in an order that goes by the head's size."""
    rows = sorted(set(kept))
    runner = load_runner(short, dtype)
    for expected, found in zip(logits_of(load_runner(whole, dtype)), logits_of(runner), strict=True):
        assert found.shape == expected.shape
        assert found.dtype == np.float32
        if dtype == "fp32":
            np.testing.assert_allclose(found[:, rows], expected[:, rows], rtol=1e-4, atol=1e-5)
        else:
            np.testing.assert_array_equal(found[:, rows].view(np.int32), expected[:, rows].view(np.int32))
        assert (np.delete(found, rows, axis=1) == -np.inf).all()


@pytest.mark.parametrize("params", [greedy(40), sampled(40, seed=3, top_p=1.0)])
def test_text_is_that_of_the_whole_head_without_the_other_tokens(
    whole: Path, tmp_path: Path, params: SamplingParams
) -> None:
    """Noise goes by a token's own id, so a draft with a short head still errs as its target does."""
    kept = KEPT["some"]
    barred = {token: -100.0 for token in range(263) if token not in kept}
    said = []
    for path, bias in ((whole, barred), (shortened(whole, tmp_path / "short", kept), {})):
        engine = load(path)
        changed = sampled(40, seed=3, top_p=1.0, temperature=params.temperature, logit_bias=bias)
        begin(engine, "s", TOKENS, changed)
        said.append(outputs(drain(engine))["s"])
    assert said[0] == said[1]
    assert set(said[1]) <= set(kept)
    assert len(set(said[1])) > 5


def test_no_file_is_the_whole_head(whole: Path) -> None:
    assert read_head_tokens(whole) == []
    assert load(whole)._runner.model.head_tokens is None


@pytest.mark.parametrize("content", ["", "{}", '"7"', "7", "null", '[1, "a"]', "[1.5]", "[[1]]", "[1, 2", "[]"])
def test_a_file_that_is_no_list_of_tokens_is_refused(whole: Path, tmp_path: Path, content: str) -> None:
    path = shortened(whole, tmp_path / "short", [])
    (path / HEAD_TOKENS).write_text(content)
    with pytest.raises(ModelUnusable, match=HEAD_TOKENS) as refused:
        read_head_tokens(path)
    with pytest.raises(UnsupportedModel, match=HEAD_TOKENS) as unsupported:
        load(path)
    for error in (refused.value, unsupported.value):
        assert len(str(error).splitlines()) == 1


@pytest.mark.parametrize("token", [-1, 263, 2**31, 2**63 - 1, 2**63, 2**70])
def test_tokens_that_the_model_has_not_are_refused(whole: Path, tmp_path: Path, token: int) -> None:
    path = shortened(whole, tmp_path / "short", [5, token])
    with pytest.raises(UnsupportedModel, match=HEAD_TOKENS) as refused:
        load(path)
    assert len(str(refused.value).splitlines()) == 1
