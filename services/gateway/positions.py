"""Places in a request's events: what the ids of server-sent events say, so that any gateway goes on behind them. Pure.

A request with one choice has one log, and its event ids are `<request>:<seq>`: the stream sequence of the record that
the event shows. With several choices the order in which their records meet is each gateway's own, so an id tells how
far every log was shown: `<request>:<newest>-<b0>-<b1>-...`, the newest sequence shown so far and how far behind it each
choice's last one lies. The closing event with the usage has `.1` at the end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from services.gateway.errors import invalid

CLOSING: Final = 1
"""`part` of the event that comes after those of the last record."""

_POSITION: Final = re.compile(
    r"(?:(?P<request>[A-Za-z0-9_-]{1,64}):)?(?P<places>[0-9]{1,18}(?:-[0-9]{1,18})*)(?:\.(?P<part>[0-9]))?"
)
_MAX_CHARS: Final = 8192


@dataclass(frozen=True)
class Position:
    """`seqs`: for each choice, the stream sequence of its last record that was shown; 0 before the first."""

    seqs: tuple[int, ...]
    part: int = 0

    @classmethod
    def start(cls, choices: int) -> Position:
        return cls((0,) * choices)

    @classmethod
    def parse(cls, text: str, request_id: str, choices: int, param: str) -> Position:
        """From an event id; with one choice also from a bare sequence.

        Raises ApiError 400 naming `param`, also for another request's id.
        """
        match = _POSITION.fullmatch(text.strip()) if len(text) <= _MAX_CHARS else None
        if match is None or match["request"] not in (None, request_id):
            raise _refused(param)
        newest, *behind = (int(place) for place in match["places"].split("-"))
        if len(behind) != (choices if choices > 1 else 0) or any(place > newest for place in behind):
            raise _refused(param)
        return cls(tuple(newest - place for place in behind) or (newest,), int(match["part"] or 0))

    def event_id(self, request_id: str) -> str:
        newest = max(self.seqs)
        behind = "".join(f"-{newest - seq}" for seq in self.seqs) if len(self.seqs) > 1 else ""
        return f"{request_id}:{newest}{behind}" + (f".{self.part}" if self.part else "")


def _refused(param: str) -> Exception:
    return invalid(f"'{param}' must be the id of an event of this stream.", param, "invalid_value")
