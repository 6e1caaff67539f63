"""The comparison as users run it, on a stack of its own with a tiny model: every cell, its figures, the same ids."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest

from loadgen.spec_bench.command import QUICK_SIZE
from loadgen.spec_bench.report import Report
from loadgen.spec_bench.run import WAVES
from loadgen.spec_bench.workloads import WORKLOADS
from tests.unit.engine_harness import tiny_model

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
PAIRS = 2
SOME = 4
"""Processes of a stack that is coming up: more than the command that starts it."""
WITHOUT_TURNS = ("chat", "chat-sampled", "edit")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Its tokens are bytes, so that prompts are long."""
    path = tiny_model(tmp_path / "tiny", max_position_embeddings=4096)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def quick_run(model: Path, home: Path) -> list[str]:
    command = [sys.executable, "-m", "loadgen", "spec", "--quick", "--seed", "3"]
    return [*command, "--model", str(model), "--home", str(home)]


def environment() -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")},
        "HEADRACE_DTYPE": "fp32",
        "HEADRACE_KV_MEMORY_GIB": "0.05",
        "HEADRACE_STORE_MEMORY_GIB": "0.05",
    }


def processes_of(home: Path) -> list[str]:
    """What runs of the stack in `home`: its supervisor, servers and services have that in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("HEADRACE_HOME") == str(home):
                found.append(f"{process.pid}: {' '.join(process.cmdline())}")
    return found


@pytest.mark.timeout(600)
def test_a_quick_run_compares_every_workload_and_leaves_nothing_behind(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("spec")  # the path to the supervisor's socket must be short
    output = place / "report.json"
    command = [*quick_run(model, place / "home"), "--concurrency", "1,2", "--pairs", str(PAIRS), "--json", str(output)]
    env = environment()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = msgspec.json.decode(output.read_bytes(), type=Report)
    assert [(cell.workload, cell.concurrency) for cell in report.cells] == [(w, n) for w in WORKLOADS for n in (1, 2)]
    for cell in report.cells:
        turns = 1 if cell.workload in WITHOUT_TURNS else QUICK_SIZE.turns
        assert cell.differing == []
        assert cell.workload in done.stdout
        scripts = cell.concurrency * (WAVES if cell.concurrency > 1 else 1)
        assert 0 < cell.output_tokens <= PAIRS * turns * scripts * 32
        assert 0 <= cell.accepted_tokens <= cell.drafted_tokens
        # What the workers counted is what the requests' logs say.
        assert sum(proposed.drafted for proposed in cell.proposers.values()) == cell.drafted_tokens
        assert len(cell.ratios) == cell.speed_up.n <= PAIRS
    assert any(cell.drafted_tokens for cell in report.cells)
    assert report.facts["seed"] == 3
    assert processes_of(place / "home") == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("told", ["starting a stack", "chat, 1 in flight"])
def test_a_run_that_is_told_to_end_again_and_again_leaves_nothing_behind(
    model: Path, tmp_path_factory: pytest.TempPathFactory, told: str
) -> None:
    """While the stack comes up, and while it is taken down."""
    home = tmp_path_factory.mktemp("spec") / "home"
    command = [*quick_run(model, home), "--workloads", "chat", "--concurrency", "1", "--pairs", "1"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith(told):
                break
        while len(processes_of(home)) < SOME:
            time.sleep(0.05)
        signals = itertools.cycle((signal.SIGINT, signal.SIGTERM))
        while run.poll() is None:
            run.send_signal(next(signals))
            time.sleep(0.3)
    ways_out = {128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGINT}
    assert run.returncode in ways_out, "the last one may meet it on its way out"
    assert processes_of(home) == []
