"""What `headrace up` shows while things start: a live table on a terminal, one line per change elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from services.cli.overview import Row
from services.cli.status_report import status_table

_PHASES = {
    "download": "downloading",
    "unpack": "unpacking",
    "convert": "converting to safetensors",
    "digest": "computing the fingerprint",
    "wait": "another process is preparing it, waiting",
}


class StartupView:
    """Feed it rows with `show`. A context manager: the live table stays on the screen as it was last."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=8, auto_refresh=False) if console.is_terminal else None
        self._printed: dict[str, str] = {}

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, rows: list[Row]) -> None:
        if self._live is not None:
            self._live.update(status_table(rows, {}), refresh=True)
            return
        for row in rows:
            if self._printed.get(row.name) != row.state:
                self._printed[row.name] = row.state
                self._console.print(f"{row.name}: {row.state}", markup=False, highlight=False)


class ModelProgress:
    """Shows `resolve_model`'s progress: a bar on a terminal, a line per phase elsewhere; silent without work."""

    def __init__(self, console: Console, name: str) -> None:
        self._console = console
        self._name = name
        self._phase = ""
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn(),
            console=console,
        )  # fmt: skip
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._bars.stop()

    def report(self, phase: str, done: int, total: int) -> None:
        text = f"{self._name}: {_PHASES.get(phase, phase)}"
        if not self._console.is_terminal:
            if phase != self._phase:
                self._console.print(text, markup=False, highlight=False)
            self._phase = phase
            return
        if self._task is None:
            self._bars.start()
        if phase != self._phase or self._task is None:
            self._phase = phase
            self._task = self._bars.add_task(text, total=total or None)
        self._bars.update(self._task, completed=done, total=total or None)
