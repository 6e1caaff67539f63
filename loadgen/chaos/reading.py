"""What one reader of one answer saw, event by event. Filled by clients, judged by `verify`."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

Kind = Literal["stream", "whole", "nats"]


class Shown(msgspec.Struct, frozen=True):
    """One event or record as it arrived. `seq` is the sequence of the log record that it shows, by its event id.

    `tokens` is how many tokens it told of: -1 where only text came, as in streams without log probabilities.
    """

    at_s: float
    choice: int
    seq: int
    text: str = ""
    tokens: int = -1
    finish: str = ""


@dataclass
class Reading:
    """`name` says which reader of the request it is. Times are `time.monotonic`."""

    name: str
    kind: Kind
    request_id: str = ""
    sent_s: float = 0.0
    shown: list[Shown] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    usage_events: int = 0
    whole: dict[str, Any] | None = None
    ended_s: float = 0.0
    error: str = ""
    gateway: int = -1
    """Which gateway it is connected to now; -1 while it is not, and over NATS."""
    last_event_id: str = ""
    reconnects: int = 0
    refusals: int = 0
    cut_asked: bool = False
    """The client is to drop its connection after the next event."""
    known: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the request was accepted and its id is known."""

    def accepted(self, request_id: str) -> None:
        self.request_id = request_id
        self.known.set()

    @property
    def done(self) -> bool:
        return self.ended_s > 0

    def text(self, choice: int) -> str:
        return "".join(shown.text for shown in self.shown if shown.choice == choice)

    def gap(self, since_s: float) -> tuple[float, float] | None:
        """The longest silence that ended after `since_s`, as this reader saw it, and its end.

        None where nothing came after it, and for whole answers, which come at once.
        """
        times = [self.sent_s, *(s.at_s for s in self.shown if s.text or s.tokens > 0 or s.finish)]
        pauses = [(later - earlier, later) for earlier, later in itertools.pairwise(times) if later > since_s]
        return max(pauses, default=None)
