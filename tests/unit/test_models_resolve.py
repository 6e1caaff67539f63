"""resolve_model's decisions that need no conversion: directories, names, refusals, fingerprints, the cache."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shared.models import ModelNotFound, ModelUnusable, resolve_model
from shared.models.cache import EntryRecord, models_root, read_entry, require_space, seal_entry, staging_directory
from shared.models.progress import silent


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "cache"
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(directory))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    return directory


def write_model(directory: Path, *, weights: bytes = b"weights", **config: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"hidden_size": 8, **config}))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(weights)
    return directory


def test_a_directory_is_served_under_its_own_name(tmp_path: Path) -> None:
    path = write_model(tmp_path / "my-model")
    files = resolve_model(str(path))
    assert (files.name, files.path) == ("my-model", path)


def test_the_fingerprint_follows_weights_and_config_and_nothing_else(tmp_path: Path) -> None:
    first = resolve_model(str(write_model(tmp_path / "a"))).fingerprint
    same = write_model(tmp_path / "b", transformers_version="9", _name_or_path="/elsewhere")
    (same / "README.md").write_text("x")
    assert resolve_model(str(same)).fingerprint == first
    assert resolve_model(str(write_model(tmp_path / "c", weights=b"Weights"))).fingerprint != first
    assert resolve_model(str(write_model(tmp_path / "d", hidden_size=16))).fingerprint != first


def test_a_changed_weight_file_of_the_same_size_gets_a_new_fingerprint(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a")
    before = resolve_model(str(path)).fingerprint
    (path / "model.safetensors").write_bytes(b"WEIGHTS")
    os.utime(path / "model.safetensors", ns=(1, 1))
    assert resolve_model(str(path)).fingerprint != before


def test_a_second_start_reads_no_weights(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a")
    resolve_model(str(path))
    phases: list[str] = []
    resolve_model(str(path), progress=lambda phase, _done, _total: phases.append(phase))
    assert phases == []


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_directory_is_refused_and_the_part_named(tmp_path: Path, missing: str) -> None:
    path = write_model(tmp_path / "a")
    (path / missing).unlink()
    with pytest.raises(ModelUnusable, match="safetensors" if missing.endswith("safetensors") else missing):
        resolve_model(str(path))


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ModelUnusable, match="pickled weights"):
        resolve_model(str(path))


@pytest.mark.parametrize("name", ["smollm2-135m-instuct", "", "../nowhere", "missing.gguf", "a b"])
def test_an_unknown_name_lists_what_is_known(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match="smollm2-135m-instruct"):
        resolve_model(name)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelUnusable, match=r"\.gguf"):
        resolve_model(str(tmp_path / "model.bin"))


def test_a_hub_name_offline_is_one_clear_line() -> None:
    with pytest.raises(ModelNotFound, match="hub cannot be reached") as caught:
        resolve_model("nobody/nothing")
    assert "\n" not in str(caught.value)


def test_without_fetching_what_is_not_there_is_an_error_that_names_the_command() -> None:
    for name in ("smollm2-135m-instruct", "nobody/nothing"):
        with pytest.raises(ModelNotFound, match="headrace model fetch"):
            resolve_model(name, fetch=False)


def test_an_entry_with_a_cut_or_missing_file_is_not_trusted() -> None:
    target = models_root() / "entry"
    target.parent.mkdir(parents=True)
    with staging_directory(target) as staging:
        (staging / "model.safetensors").write_bytes(b"12345678")
        seal_entry(staging, target, "m", "source", "f" * 32)
    assert read_entry(target) == EntryRecord("m", "source", "f" * 32, {"model.safetensors": 8})
    (target / "model.safetensors").write_bytes(b"1234")
    assert read_entry(target) is None
    (target / "model.safetensors").unlink()
    assert read_entry(target) is None


def test_what_a_killed_process_left_in_staging_is_removed_by_the_next() -> None:
    target = models_root() / "entry"
    stale = target.with_name(".entry.staging-dead")
    stale.mkdir(parents=True)
    (stale / "half").write_bytes(b"x")
    with staging_directory(target):
        assert not stale.exists()


def test_a_failed_attempt_leaves_nothing_behind() -> None:
    target = models_root() / "entry"
    target.parent.mkdir(parents=True)

    def fail_half_way() -> None:
        with staging_directory(target) as staging:
            (staging / "half").write_bytes(b"x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert list(target.parent.iterdir()) == []


def test_too_little_disk_is_said_before_anything_is_downloaded(tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable, match="HEADRACE_CACHE_DIR"):
        require_space(tmp_path, 1 << 60, "fetching it")
    require_space(tmp_path, 1, "fetching it")


def test_a_read_only_cache_costs_a_second_reading_only(tmp_path: Path, cache: Path) -> None:
    cache.parent.mkdir(exist_ok=True)
    cache.write_text("a file where the directory would be")
    path = write_model(tmp_path / "a")
    assert resolve_model(str(path), progress=silent).fingerprint == resolve_model(str(path)).fingerprint
