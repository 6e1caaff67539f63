"""Packed drafts: small, rebuilt from the target without torch, and found by name."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from services.draft.distill.acceptance import Acceptance, Accepted
from services.draft.distill.command import _request
from services.draft.distill.recipe import CorpusRecipe, TrainingRecipe
from services.draft.distill.result import DistillReport, pack, read_report, write_model
from services.draft.distill.student import make_student
from services.draft.vocabulary import require_same_vocabulary
from shared.models import ModelFiles, ModelUnusable, resolve_model
from shared.models import drafts as drafts_module
from shared.models import resolve as resolve_module
from shared.models.drafts import HEAD_TOKENS, PACKED_HEAD, BuiltinDraft, build_draft, read_head_tokens
from tests.unit.distill_harness import chat_target, written
from tests.unit.engine_harness import begin, drain, greedy, load, outputs

RECIPE = TrainingRecipe(CorpusRecipe("tiny", "f", "fp32", 1), 100, [0, 3], 1)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """(target, draft, packed draft)"""
    root = tmp_path_factory.mktemp("packed")
    target = chat_target(root / "target", tie_word_embeddings=request.param)
    student = make_student(target, [0, 3])
    (root / "draft").mkdir()
    write_model(student, target, root / "draft", [], written())
    nothing = Accepted(Acceptance(), Acceptance())
    report = DistillReport(RECIPE, 1, 1, 1, student.shared, 0.0, 0.0, 0.0, nothing)
    size = pack(root / "draft", report, root / "packed.safetensors")
    assert size == (root / "packed.safetensors").stat().st_size
    return target, root / "draft", root / "packed.safetensors"


def test_a_packed_draft_is_rebuilt_close_to_what_it_was(made: tuple[Path, Path, Path], tmp_path: Path) -> None:
    target, draft, packed = made
    build_draft(packed, target, tmp_path)
    before, after = load_file(draft / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert set(before) == set(after)
    for name, weight in before.items():
        assert after[name].dtype == np.float16
        step = np.abs(weight.astype(np.float32)).max(-1, keepdims=True) / 127
        most = 0.51 * step + 1e-3 * np.abs(weight) if weight.ndim > 1 and "layers" in name else 0
        assert (np.abs(after[name].astype(np.float32) - weight) <= most).all(), name
    engine = load(tmp_path)
    begin(engine, "s", [1, 2, 3], greedy(4))
    assert drain(engine)
    require_same_vocabulary(ModelFiles("t", target, "f"), ModelFiles("d", tmp_path, "f"))


def test_it_holds_the_trained_weights_only_in_a_byte_each(made: tuple[Path, Path, Path]) -> None:
    _, _, packed = made
    stored = load_file(packed)
    assert not any("embed" in name or "lm_head" in name for name in stored)
    matrices = [w for w in stored.values() if w.ndim > 1]
    assert matrices
    assert all(w.dtype == np.int8 for w in matrices)


@pytest.mark.parametrize("kept", [[], [3, 9, 200]])
def test_what_the_head_knows_is_packed_and_rebuilt(
    made: tuple[Path, Path, Path], tmp_path: Path, kept: list[int]
) -> None:
    target, _, _ = made
    student = make_student(target, [0, 3])
    for name in ("draft", "rebuilt"):
        (tmp_path / name).mkdir()
    packed = tmp_path / "packed.safetensors"
    write_model(student, target, tmp_path / "draft", kept, written())
    report = DistillReport(
        RECIPE, 1, 1, 1, student.shared, 0.0, 0.0, 0.0, Accepted(Acceptance(), Acceptance()), len(kept)
    )
    pack(tmp_path / "draft", report, packed)
    assert (PACKED_HEAD in load_file(packed)) == bool(kept)
    build_draft(packed, target, tmp_path / "rebuilt")
    for name in ("draft", "rebuilt"):
        assert read_head_tokens(tmp_path / name) == kept
        assert (tmp_path / name / HEAD_TOKENS).is_file() == bool(kept)
    again = read_report(tmp_path / "rebuilt")
    assert again is not None
    assert again.head_tokens == len(kept)
    engine = load(tmp_path / "rebuilt")
    begin(engine, "s", [1, 2, 3], greedy(8))
    found = outputs(drain(engine))["s"]
    assert not kept or set(found) <= set(kept)


def test_a_whole_head_takes_the_place_of_a_short_one(made: tuple[Path, Path, Path], tmp_path: Path) -> None:
    target, _, _ = made
    student = make_student(target, [0, 3])
    write_model(student, target, tmp_path, [5, 6], written())
    write_model(student, target, tmp_path, [], written())
    assert read_head_tokens(tmp_path) == []


def test_the_number_of_tokens_may_not_be_negative(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--target", "t", "--out", "o"]
    assert _request(options).head_tokens == 8192
    assert _request([*options, "--head-tokens", "0"]).head_tokens == 0
    with pytest.raises(SystemExit):
        _request([*options, "--head-tokens", "-1"])
    assert "--head-tokens not negative" in capsys.readouterr().err


def test_building_needs_no_torch(made: tuple[Path, Path, Path], tmp_path: Path) -> None:
    target, _, packed = made
    program = (
        "import sys; from pathlib import Path; from shared.models.drafts import build_draft; "
        f"build_draft(Path({str(packed)!r}), Path({str(target)!r}), Path({str(tmp_path)!r})); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
    assert (tmp_path / "config.json").is_file()
    assert (tmp_path / "distill.json").is_file()


def test_a_target_that_lacks_what_the_draft_takes_from_it_is_named(
    made: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    _, _, packed = made
    (tmp_path / "target").mkdir()
    save_file({"other": np.zeros(1, np.float32)}, tmp_path / "target" / "model.safetensors")
    with pytest.raises(ModelUnusable, match=r"has no .*model\.embed_tokens\.weight"):
        build_draft(packed, tmp_path / "target", tmp_path)


@pytest.mark.parametrize("damage", [b"", b"x" * 64, None])
def test_a_packed_file_that_is_none_is_refused(
    made: tuple[Path, Path, Path], tmp_path: Path, damage: bytes | None
) -> None:
    target, draft, _ = made
    path = tmp_path / "packed.safetensors"
    if damage is None:
        shutil.copyfile(draft / "model.safetensors", path)  # a model, but no packed draft
    else:
        path.write_bytes(damage)
    with pytest.raises(ModelUnusable, match="cannot be read"):
        build_draft(path, target, tmp_path)


@pytest.fixture
def builtin(made: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A built-in draft whose built-in target is the tiny one."""
    target, _, packed = made
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(drafts_module, "_PACKED", tmp_path)
    shutil.copyfile(packed, tmp_path / "tiny-draft.safetensors")
    draft = BuiltinDraft("tiny-draft", "smollm2-135m-instruct", 1, "none")
    monkeypatch.setitem(resolve_module.BUILTIN_DRAFTS, "tiny-draft", draft)
    monkeypatch.setattr(resolve_module, "_resolve_builtin", lambda *_: ModelFiles("tiny", target, "f"))
    return "tiny-draft"


def test_a_builtin_draft_is_built_once_and_found_again(builtin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve_model(builtin, fetch=False)
    assert first.name == builtin
    assert (first.path / "model.safetensors").is_file()

    def refuse(*_: object) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(resolve_module, "build_draft", refuse)
    assert resolve_model(builtin) == first


def test_a_new_packed_file_gives_a_new_entry(builtin: str, tmp_path: Path) -> None:
    first = resolve_model(builtin)
    packed = tmp_path / "tiny-draft.safetensors"
    stored = load_file(packed)
    with safe_open(packed, framework="np") as file:
        metadata = file.metadata()
    stored["model.norm.weight"] = stored["model.norm.weight"] + 1
    save_file(stored, packed, metadata)
    second = resolve_model(builtin)
    assert second.path != first.path
    assert second.fingerprint != first.fingerprint


def test_an_installation_without_the_packed_file_says_so(builtin: str, tmp_path: Path) -> None:
    (tmp_path / "tiny-draft.safetensors").unlink()
    with pytest.raises(ModelUnusable, match="missing from this installation"):
        resolve_model(builtin)
