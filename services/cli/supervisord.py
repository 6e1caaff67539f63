"""supervisord as a stack runs it: a process that keeps dying early is started again for ever, and soon each time.

supervisord itself waits a second longer after each early death and gives up at last, so that kills that follow each
other closely would keep an instance away for minutes, or for good.
"""

from __future__ import annotations

import os
import signal

import supervisor.process
import supervisor.supervisord

MAX_WAIT_S = 3
"""Between early deaths; one that cannot start at all costs a third of a core at most with it."""


class Process(supervisor.process.Subprocess):  # type: ignore[misc]  # the package is untyped
    """A supervised process. `backoff` counts its early deaths in a row, and is the next wait in seconds."""

    backoff: int
    exitstatus: int | None

    def finish(self, pid: int, status: int) -> None:
        """Called when it has ended. A kill is somebody else's doing and makes no wait longer than the first.

        The exit status is kept in any case, and the number of a signal: `headrace drain` tells how an instance ended.
        """
        exit_status = os.waitstatus_to_exitcode(status)
        if exit_status == -signal.SIGKILL:
            self.backoff = 0
        super().finish(pid, status)
        self.exitstatus = exit_status

    def change_state(self, new_state: int, expected: bool = True) -> None:
        self.backoff = min(self.backoff, MAX_WAIT_S - 1)
        super().change_state(new_state, expected)


if __name__ == "__main__":
    supervisor.process.Subprocess = Process  # looked up there for each program
    supervisor.supervisord.main()
