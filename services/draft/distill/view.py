"""What a distillation shows: a bar for each stage on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_EVERY_S = 30.0


class DistillView:
    """A context manager; `begin` names a stage, `at` says how far it is, `say` prints a line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} {task.fields[unit]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
        )
        self._task: TaskID | None = None
        self._stage = self._unit = ""
        self._total = self._began_at = 0
        self._began_s = self._printed_s = 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def phase(self, name: str, _done: int, _total: int) -> None:
        """As `resolve_model` reports what it does."""
        if name != self._stage:
            self._stage = name
            self.say(f"target: {name}")

    def begin(self, stage: str, total: int, unit: str, done: int = 0) -> None:
        """`done` of `total` were done before and do not count in the speed."""
        self._stage, self._unit, self._total, self._began_at = stage, unit, total, done
        self._began_s, self._printed_s = time.monotonic(), 0.0
        if self._console.is_terminal:
            self._task = self._bars.add_task(stage, total=total, completed=min(done, total), unit=unit, note="")

    def at(self, done: int, note: str = "") -> None:
        done = min(done, self._total)
        if self._task is not None:
            self._bars.update(self._task, completed=done, note=note)
            return
        now_s = time.monotonic()
        if now_s - self._printed_s < LINE_EVERY_S and done < self._total:
            return
        if done == self._total and self._printed_s == float("inf"):
            return
        self._printed_s = now_s if done < self._total else float("inf")
        speed = (done - self._began_at) / max(now_s - self._began_s, 1e-9)
        left = f", {(self._total - done) / speed / 60:.0f} min left" if speed > 0 and done < self._total else ""
        self.say(f"{self._stage}: {done:,} of {self._total:,} {self._unit}, {speed:.3g} a second{left} {note}".rstrip())
