"""Exceptions as bounded text for the log: frames, types and messages, without local variables or quoted input."""

from __future__ import annotations

import traceback
from typing import Final

MAX_MESSAGE_CHARS: Final = 300
MAX_FRAMES: Final = 20
MAX_EXCEPTIONS: Final = 8
_QUOTING_MODULES: Final = ("pydantic", "fastapi", "jinja2", "json")
"""Their messages quote the input that they reject, which may be a prompt."""


def describe_exception(exception: BaseException) -> str:
    """The exception, its causes and the members of a group, oldest cause last; at most `MAX_EXCEPTIONS` of them."""
    parts: list[str] = []
    pending: list[tuple[str, BaseException]] = [("", exception)]
    seen: set[int] = set()
    while pending and len(parts) < MAX_EXCEPTIONS:
        relation, current = pending.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        frames = "".join(traceback.format_tb(current.__traceback__, limit=-MAX_FRAMES))
        parts.append(f"{relation}{exception_line(current)}\n{frames}".rstrip())
        if current.__cause__ is not None:
            pending.append(("caused by ", current.__cause__))
        elif current.__context__ is not None and not current.__suppress_context__:
            pending.append(("while handling ", current.__context__))
        if isinstance(current, BaseExceptionGroup):
            pending.extend(("in the group: ", member) for member in current.exceptions)
    return "\n".join(parts)


def exception_line(exception: BaseException) -> str:
    """`Type: message` on one line, with the message cut, or left out where it may quote a user's input."""
    kind = type(exception)
    if kind.__module__.partition(".")[0] in (*_QUOTING_MODULES, "pydantic_core"):
        return f"{kind.__name__} (message withheld)"
    message = " ".join(str(exception).split())
    if len(message) > MAX_MESSAGE_CHARS:
        message = f"{message[:MAX_MESSAGE_CHARS]}...({len(message) - MAX_MESSAGE_CHARS} more)"
    return f"{kind.__name__}: {message}" if message else kind.__name__
