"""Digest of a model's config and weights: equal only for models whose KV blocks may be exchanged.

Reading all weights takes seconds, so a digest is remembered by the files' sizes and modification times.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from shared.models.cache import cache_root
from shared.models.errors import ModelUnusable
from shared.models.progress import Progress

_IGNORED_CONFIG = frozenset({"_name_or_path", "_model_name_or_path", "transformers_version", "use_cache"})
"""Fields of config.json that say nothing about the numbers a model computes."""
_CHUNK_BYTES = 8 << 20


def model_fingerprint(directory: Path, progress: Progress, *, sha256: Callable[[Path, Progress], str]) -> str:
    """32 hex digits over the canonical config and all safetensors files. Raises ModelUnusable."""
    try:
        config = msgspec.json.decode((directory / "config.json").read_bytes(), type=dict[str, object])
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelUnusable(f"{directory / 'config.json'} cannot be read: {error}") from error
    relevant = {key: value for key, value in config.items() if key not in _IGNORED_CONFIG}
    digest = hashlib.sha256(msgspec.json.encode(relevant, order="deterministic"))
    for path in weight_files(directory):
        digest.update(path.name.encode() + sha256(path, progress).encode())
    return digest.hexdigest()[:32]


def weight_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def file_sha256(path: Path, progress: Progress) -> str:
    total, done, digest = path.stat().st_size, 0, hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress("digest", done, total)
    return digest.hexdigest()


def remembered_sha256(path: Path, progress: Progress) -> str:
    """`file_sha256`, from the cache directory when the file has not changed since it was last read."""
    stat = path.stat()
    identity = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}"
    note = cache_root() / "digests" / hashlib.sha256(identity.encode()).hexdigest()[:32]
    if (known := _read_note(note)) is not None:
        return known
    text = file_sha256(path, progress)
    _write_note(note, text)
    return text


def _read_note(note: Path) -> str | None:
    try:
        text = note.read_text("ascii")
    except (OSError, UnicodeDecodeError):
        return None
    return text if len(text) == hashlib.sha256().digest_size * 2 else None


def _write_note(note: Path, text: str) -> None:
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(text, "ascii")
    except OSError:
        return  # a read-only cache costs the next start a second reading, nothing else
