"""Ctrl-C and its relatives. They are counted, and raised only where something long must be broken off.

An exception that a handler raises may surface inside a destructor or a library's catch-all, and is then lost; so a loop
that waits for the user asks for the count instead.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ASK_TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal that asks a foreground program to end has arrived."""


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP from `install` on."""

    def __init__(self) -> None:
        self.count = 0
        self._raise = False

    @classmethod
    @contextmanager
    def install(cls) -> Iterator[Interrupts]:
        interrupts = cls()
        before = {number: signal.signal(number, interrupts._on_signal) for number in _ASK_TO_END}
        try:
            yield interrupts
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def raising(self, beyond: int = 0) -> Iterator[None]:
        """Inside, each signal raises Interrupted at once; one that came before or got lost does so at the borders.

        The first `beyond` signals since `install` are not meant.
        """
        self._require(beyond)
        self._raise = True
        try:
            yield
        finally:
            self._raise = False
        self._require(beyond)

    def _require(self, at_most: int) -> None:
        if self.count > at_most:
            raise Interrupted

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        if self._raise:
            raise Interrupted
