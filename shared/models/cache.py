"""The cache of converted models: where it is, how an entry is written once and whole, when it is trusted again.

An entry is a directory that appears by one rename. Its `headrace.json` names every file's size and the fingerprint.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import platformdirs
from filelock import FileLock, Timeout

from shared.models.errors import ModelUnusable
from shared.models.progress import Progress

_RECORD = "headrace.json"
_LOCK_POLL_S = 1.0


class EntryRecord(msgspec.Struct, frozen=True):
    """Written last into an entry: what belongs to it. `source` says what it was made from."""

    name: str
    source: str
    fingerprint: str
    sizes: dict[str, int]
    v: int = 1


def cache_root() -> Path:
    """`HEADRACE_CACHE_DIR`, or the user's cache directory."""
    override = os.environ.get("HEADRACE_CACHE_DIR")
    return Path(override).expanduser() if override else platformdirs.user_cache_path("headrace")


def models_root() -> Path:
    return cache_root() / "models"


def read_entry(directory: Path) -> EntryRecord | None:
    """The record of a complete entry; None when it is absent, or a file of it is missing or cut short."""
    try:
        record = msgspec.json.decode((directory / _RECORD).read_bytes(), type=EntryRecord)
        whole = all((directory / file).stat().st_size == size for file, size in record.sizes.items())
    except (OSError, msgspec.MsgspecError):
        return None
    return record if whole else None


def seal_entry(staging: Path, target: Path, name: str, source: str, fingerprint: str) -> EntryRecord:
    """Make the staged files durable, record them and move them to `target` in one rename."""
    files = sorted(path for path in staging.iterdir() if path.is_file())
    for path in files:
        path.chmod(0o644)  # weights are written 600; services may run as another user than the one who fetched
        _sync(path)
    record = EntryRecord(name, source, fingerprint, {path.name: path.stat().st_size for path in files})
    (staging / _RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2))
    _sync(staging / _RECORD)
    if target.exists():  # damaged, or read_entry would have found it
        shutil.rmtree(target)
    staging.rename(target)
    return record


@contextmanager
def exclusive(target: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock of one entry; other processes wait here and report `wait`.

    Raises:
        ModelUnusable: the cache directory cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.with_name(f".{target.name}.lock"))
        waited_s = 0
        while True:
            try:
                lock.acquire(timeout=_LOCK_POLL_S)
                break
            except Timeout:
                waited_s += 1
                progress("wait", waited_s, 0)
    except OSError as error:
        raise ModelUnusable(f"cannot write to {target.parent} ({error.strerror}); set HEADRACE_CACHE_DIR") from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def staging_directory(target: Path) -> Iterator[Path]:
    """A fresh directory beside `target`, removed afterwards unless it was sealed. Only the lock's holder may enter.

    What holders that were killed left behind is removed first.
    """
    prefix = f".{target.name}.staging-"
    for stale in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    staging = target.with_name(f"{prefix}{uuid.uuid4().hex[:8]}")
    staging.mkdir()
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def require_space(directory: Path, needed_bytes: int, what: str) -> None:
    """Raises ModelUnusable when the disk of `directory` has less than `needed_bytes` free."""
    free = shutil.disk_usage(directory).free
    if free < needed_bytes:
        raise ModelUnusable(
            f"{what} needs {needed_bytes / 1e9:.1f} GB in {directory}, {free / 1e9:.1f} GB are free; "
            "make room or set HEADRACE_CACHE_DIR"
        )


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
