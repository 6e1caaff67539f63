"""Finds and ends processes that a supervisor which was killed left behind.

They are known by the stack's id in their environment, so no other process can be taken for one.
"""

from __future__ import annotations

import psutil  # type: ignore[import-untyped]

_TERM_WAIT_S = 10.0
_KILL_WAIT_S = 5.0
_MOST_LOOKS = 10
"""One after the supervisor's end finds all that it started; the others are for what cannot be killed yet."""


def stack_processes(stack_id: str) -> list[psutil.Process]:
    """All living processes of one run of a stack, the supervisor included."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("HEADRACE_STACK_ID") == stack_id and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue  # it ended, or it is another user's
    return found


def end_processes(stack_id: str, *, gently: bool = True) -> int:
    """SIGTERM (when `gently`), then SIGKILL. Returns how many there were. psutil guards against reused ids.

    While it looks, the supervisor may start another, which nobody would end then: so it looks until there is none.
    """
    found: set[psutil.Process] = set()
    for _ in range(_MOST_LOOKS):
        processes = stack_processes(stack_id)
        if not processes:
            break
        found.update(processes)
        remaining = processes
        if gently:
            for process in processes:
                _send(process, kill=False)
            _, remaining = psutil.wait_procs(processes, timeout=_TERM_WAIT_S)
        for process in remaining:
            _send(process, kill=True)
        psutil.wait_procs(remaining, timeout=_KILL_WAIT_S)
        gently = False
    return len(found)


def _send(process: psutil.Process, *, kill: bool) -> None:
    try:
        if kill:
            process.kill()
        else:
            process.terminate()
    except psutil.NoSuchProcess:
        return
