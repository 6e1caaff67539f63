"""What a supervisor left behind is found and ended, also what it starts while one looks."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import pytest

from services.cli.leftovers import end_processes, stack_processes

STARTS_OTHERS = """
import subprocess, time
for _ in range(150):
    subprocess.Popen(["sleep", "60"])
    print(flush=True)
    time.sleep(0.002)
time.sleep(60)
"""


@pytest.mark.parametrize("gently", [True, False])
def test_what_is_started_meanwhile_is_ended_too_and_nothing_else(gently: bool) -> None:
    stack_id, other_id = uuid.uuid4().hex, uuid.uuid4().hex
    with (
        subprocess.Popen(["sleep", "60"], env={**os.environ, "HEADRACE_STACK_ID": other_id}) as other,
        subprocess.Popen(
            [sys.executable, "-c", STARTS_OTHERS],
            env={**os.environ, "HEADRACE_STACK_ID": stack_id},
            stdout=subprocess.PIPE,
        ) as supervisor,
    ):
        try:
            assert supervisor.stdout is not None
            supervisor.stdout.readline()
            assert end_processes(stack_id, gently=gently) > 1
            assert stack_processes(stack_id) == []
            assert other.poll() is None
        finally:
            other.kill()
            supervisor.kill()
    assert end_processes(stack_id) == 0
