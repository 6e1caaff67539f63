"""`headrace restart`: one instance after the other, so that somebody serves all the time.

Where nobody else could take over, a spare starts first. Killed in between, the command leaves what the next one
understands: a spare that serves on, is used, then removed; an instance that was not started again counts as drained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import groupby

import psutil  # type: ignore[import-untyped]

from services.cli.draining import Ending, drain
from services.cli.errors import StartFailed, TooLittle
from services.cli.overview import Row
from services.cli.readiness import await_instances
from services.cli.roll_call import rows_of
from services.cli.spec import number_of, parse_stage, spare_of, stage_of
from services.cli.stack import Stack
from shared.protocol.subjects import Stage


class RollingRestart:
    """Restarts instances of a stack and keeps it in step; `say` is told each step."""

    def __init__(self, stack: Stack, say: Callable[[str], None], ready_timeout_s: float) -> None:
        self.stack = stack
        self._say = say
        self._ready_timeout_s = ready_timeout_s
        self._endings: list[Ending] = []
        self.restarted: list[str] = []
        """In the order in which they came back."""

    def run(self, names: Iterable[str]) -> list[Ending]:
        """Restart these, stage by stage. Returns how each ended that was running.

        Raises StartFailed when one does not come back: what serves in its place is left running then. Raises TooLittle
        when there is no memory for a spare; nothing has changed then.
        """
        for stage, of_stage in groupby(names, stage_of):
            self._restart_stage(parse_stage(stage), [name for name in of_stage if name != spare_of(parse_stage(stage))])
        return self._endings

    def at_once(self, names: Iterable[str]) -> list[Ending]:
        """Restart these one after the other without a spare, servers too: each is away until it is ready again."""
        left_over = {spare_of(stage): stage for stage in self.stack.spec.spares}
        for name in names:
            if name in left_over:
                self._remove_spare(left_over[name])
                continue
            self._say(f"restarting {name}")
            if not self._is_down(name):
                self._drain(name)
            self._start(name)
        return self._endings

    def retire_spare(self, stage: Stage, count: int) -> None:
        """Before a stage changes to `count` instances: end the spare that a killed command left.

        The instance that it stands in for serves again first, unless the change removes it. Raises StartFailed; the
        spare serves on then.
        """
        if stage not in self.stack.spec.spares:
            return
        deputised = self.stack.spec.spares[stage]
        if deputised < min(count, self.stack.spec.counts[stage]):
            self._await_behind_spare(stage, f"{stage}-{deputised}")
        self._remove_spare(stage)

    def _restart_stage(self, stage: Stage, names: list[str]) -> None:
        """Those that are down come first: they may serve for the others then."""
        down = [name for name in names if self._is_down(name)]
        for name in down:
            self._say(f"starting {name}, which was down")
            self._start(name)
        for name in names:
            if name not in down:
                self._restart_one(stage, name)
        self._remove_spare(stage)

    def _restart_one(self, stage: Stage, name: str) -> None:
        if not self._has_deputy(stage, name):
            self._start_spare(stage, name)
        self._say(f"restarting {name}")
        self._drain(name)
        self._await_behind_spare(stage, name)

    def _await_behind_spare(self, stage: Stage, name: str) -> None:
        """Until it serves (again), started where it is down."""
        try:
            self._start(name)
        except StartFailed as failed:
            if stage not in self.stack.spec.spares:
                raise
            raise StartFailed(f"{failed}; {spare_of(stage)} serves in its place") from failed

    def _is_down(self, name: str) -> bool:
        """No process of it runs: it was stopped, or has ended by itself and waits for its next start."""
        info = self.stack.supervisor.processes().get(name)
        return info is None or not info.pid

    def _has_deputy(self, stage: Stage, name: str) -> bool:
        """Whether another instance takes over. Clients of a gateway know one port, so only its own spare does."""
        if stage == "gateway" and self.stack.spec.spares.get(stage) != number_of(name):
            return False
        told = {row.name: row for row in asyncio.run(rows_of(self.stack)) if row.stage == stage and row.live}
        mine = told.pop(name, None)
        if stage == "gateway":
            return spare_of(stage) in told
        return any(mine is None or _model(row) == _model(mine) for row in told.values())

    def _start_spare(self, stage: Stage, name: str) -> None:
        self._remove_spare(stage)  # it may stand in for another one, or be down
        self._require_memory(name)
        self._say(f"starting {spare_of(stage)}, which serves while {name} restarts")
        self.stack = self.stack.add_spare(stage, number_of(name))
        try:
            asyncio.run(await_instances(self.stack, [spare_of(stage)], self._ready_timeout_s))
        except StartFailed:
            self.stack = self.stack.remove_spare(stage)
            raise

    def _remove_spare(self, stage: Stage) -> None:
        if stage in self.stack.spec.spares:
            self._drain(spare_of(stage))
            self.stack = self.stack.remove_spare(stage)

    def _require_memory(self, name: str) -> None:
        """A spare needs what the instance uses that it stands in for. Raises TooLittle."""
        try:
            needed = psutil.Process(self.stack.supervisor.processes()[name].pid).memory_info().rss
        except psutil.Error:
            return  # it has just died, and its size with it
        available = psutil.virtual_memory().available
        if needed > available:
            raise TooLittle(
                f"a spare for {name} needs about {needed / 1e9:.1f} GB, {available / 1e9:.1f} GB are available; "
                f"make room, or restart it with a gap: headrace restart {name} --at-once"
            )

    def _drain(self, name: str) -> None:
        self._endings += drain(self.stack.supervisor, [name], lambda ending: self._say(str(ending)))

    def _start(self, name: str) -> None:
        self.stack.supervisor.add(name)
        asyncio.run(await_instances(self.stack, [name], self._ready_timeout_s))
        self.restarted.append(name)


def _model(row: Row) -> str:
    return row.status.model if row.status is not None else ""
