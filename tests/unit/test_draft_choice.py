"""Which draft model `auto` means."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli.settings import CliSettings
from services.cli.up import make_spec
from shared.models.drafts import draft_of


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("shared.models.drafts._PACKED", tmp_path)
    monkeypatch.delenv("HEADRACE_DRAFT_MODEL", raising=False)
    return tmp_path / "smollm2-135m-instruct-draft.safetensors"


def test_auto_is_the_draft_that_was_shipped_for_that_very_model(packed: Path) -> None:
    assert draft_of("smollm2-135m-instruct") == ""
    packed.touch()
    assert draft_of("smollm2-135m-instruct") == "smollm2-135m-instruct-draft"
    assert draft_of("models/smollm2-135m-instruct") == ""


def test_a_stack_drafts_with_the_shipped_one_unless_told_otherwise(packed: Path) -> None:
    packed.touch()
    assert make_spec(CliSettings(_env_file=None), {}).draft_model == "auto"
    assert make_spec(CliSettings(draft_model="", _env_file=None), {}).draft_model == ""
    assert make_spec(CliSettings(draft_model="my/own", _env_file=None), {}).draft_model == "my/own"
