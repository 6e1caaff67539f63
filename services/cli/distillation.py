"""`headrace distill`: a process of the draft service's package, which may load torch, takes this one's place."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import NoReturn

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def become(options: Mapping[str, str], threads: int) -> NoReturn:
    """Replace this process. Does not return."""
    command = [sys.executable, "-m", "services.draft.distill"]
    for name, value in options.items():
        command += [f"--{name}", value]
    environment = {**os.environ, **dict.fromkeys(_THREAD_VARIABLES, str(threads))}
    os.execve(sys.executable, command, environment)  # noqa: S606 (fixed program, no shell)
