"""Reads the log files of supervised processes: the tail, what comes, and the last complaint in a line.

Services log JSON lines, servers plain text; both are shown as they are read by people.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

_TAIL_BYTES = 256 << 10
_POLL_S = 0.25
_MAX_COMPLAINT = 300
_HIDDEN = frozenset({"event", "level", "time", "logger", "service", "instance"})
_BAD_LEVELS = frozenset({"error", "critical", "warning"})
_FRAME = " |+-"
"""Drawn around exception groups."""
_EXCEPTION = re.compile(r"[ |]*((?:\w+\.)*\w*(?:Error|Exception): .*)")
"""The last line of a traceback."""


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a file, at most `_TAIL_BYTES` of them; none when there is no file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.splitlines()[-lines:] if lines else []


def last_complaint(path: Path) -> str:
    """The last error or warning of a log, or what an uncaught exception said, else its last line; of bounded length."""
    lines = [line for line in tail(path, 200) if line.strip(_FRAME)]
    for line in reversed(lines):
        fields = _fields(line)
        if fields is None and (exception := _EXCEPTION.match(line)):
            return exception.group(1)[:_MAX_COMPLAINT]
        if line.startswith("Error: ") or (fields is not None and fields.get("level") in _BAD_LEVELS):
            return readable(line)[:_MAX_COMPLAINT]
    return readable(lines[-1])[:_MAX_COMPLAINT] if lines else "it wrote nothing"


def readable(line: str) -> str:
    """A JSON record as `time level event key=value ...`; any other line unchanged."""
    fields = _fields(line)
    if fields is None:
        return line.rstrip()
    rest = " ".join(f"{key}={value}" for key, value in fields.items() if key not in _HIDDEN)
    head = f"{fields.get('time', '')} {fields.get('level', ''):<7} {fields['event']}"
    return f"{head} {rest}".strip()


@dataclass
class Follower:
    """Yields lines as they are appended, across rotation and truncation. Position starts at the end of the file."""

    path: Path
    _file: IO[bytes] | None = field(default=None, repr=False)
    _partial: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        self._open()
        if self._file is not None:
            self._file.seek(0, 2)

    def new_lines(self) -> list[str]:
        if self._file is None:
            self._open()
        if self._file is None:
            return []
        data = self._partial + self._file.read()
        if self._replaced():
            data += self._file.read()
            self._open()
            data += self._file.read() if self._file is not None else b""
        *whole, self._partial = data.split(b"\n")
        return [line.decode(errors="replace") for line in whole]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        self.close()
        try:
            self._file = self.path.open("rb")
        except FileNotFoundError:
            self._file = None

    def _replaced(self) -> bool:
        """Whether the name now belongs to another file (rotation), or this one was cut."""
        if self._file is None:
            return False
        try:
            current = self.path.stat()
        except FileNotFoundError:
            return False
        opened = self._file.fileno()
        position = self._file.tell()
        return not _same(opened, current.st_ino) or current.st_size < position


def _same(descriptor: int, inode: int) -> bool:
    return os.fstat(descriptor).st_ino == inode


def follow(paths: Mapping[str, Path], emit: Callable[[str, str], None]) -> None:
    """Call `emit(program, line)` for all that is appended, until interrupted."""
    followers = {name: Follower(path) for name, path in paths.items()}
    try:
        while True:
            for name, line in _arrived(followers):
                emit(name, line)
            time.sleep(_POLL_S)
    finally:
        for follower in followers.values():
            follower.close()


def _arrived(followers: Mapping[str, Follower]) -> Iterator[tuple[str, str]]:
    for name, follower in followers.items():
        lines: Iterable[str] = follower.new_lines()
        for line in lines:
            yield name, line


def _fields(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        fields = msgspec.json.decode(line.encode(), type=dict[str, Any])
    except msgspec.MsgspecError:
        return None
    return fields if isinstance(fields.get("event"), str) else None
