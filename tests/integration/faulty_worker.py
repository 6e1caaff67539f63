"""A worker that a certain token breaks: `python -m tests.integration.faulty_worker STAGE abort|hang TOKEN_ID`.

A step whose batch holds a prompt with that token ends the process, or never ends. Everything else is the real service.
"""

from __future__ import annotations

import importlib
import os
import resource
import sys
import time

from shared.engine.scheduler import Scheduler, Work


def break_on(token_id: int, fault: str) -> None:
    schedule = Scheduler.schedule

    def faulty(scheduler: Scheduler) -> list[Work]:
        work = schedule(scheduler)
        if any(token_id in item.sequence.token_ids[: item.sequence.num_prompt] for item in work):
            if fault == "abort":
                os.abort()
            time.sleep(3600)
        return work

    Scheduler.schedule = faulty  # type: ignore[method-assign]


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    break_on(int(sys.argv[3]), sys.argv[2])
    sys.exit(importlib.import_module(f"services.{sys.argv[1]}.main").main())
