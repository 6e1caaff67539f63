"""The comparison as users run it, on a stack of its own with a tiny model: every cell, its figures, the same ids."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from loadgen.spec_bench.command import QUICK_SIZE
from loadgen.spec_bench.report import Report
from loadgen.spec_bench.workloads import WORKLOADS
from tests.unit.engine_harness import tiny_model

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
PAIRS = 2
WITHOUT_TURNS = ("chat", "chat-sampled", "edit")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Its tokens are bytes, so that prompts are long."""
    path = tiny_model(tmp_path / "tiny", max_position_embeddings=4096)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.mark.timeout(600)
def test_a_quick_run_compares_every_workload_and_leaves_nothing_behind(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("spec")  # the path to the supervisor's socket must be short
    output = place / "report.json"
    command = [sys.executable, "-m", "loadgen", "spec", "--quick", "--seed", "3", "--model", str(model)]
    command += ["--concurrency", "1,2", "--pairs", str(PAIRS), "--home", str(place / "home"), "--json", str(output)]
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")},
        "HEADRACE_DTYPE": "fp32",
        "HEADRACE_KV_MEMORY_GIB": "0.05",
        "HEADRACE_STORE_MEMORY_GIB": "0.05",
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = msgspec.json.decode(output.read_bytes(), type=Report)
    assert [(cell.workload, cell.concurrency) for cell in report.cells] == [(w, n) for w in WORKLOADS for n in (1, 2)]
    for cell in report.cells:
        turns = 1 if cell.workload in WITHOUT_TURNS else QUICK_SIZE.turns
        assert cell.differing == []
        assert cell.workload in done.stdout
        assert 0 < cell.output_tokens <= PAIRS * turns * cell.concurrency * 32
        assert 0 <= cell.accepted_tokens <= cell.drafted_tokens
        # What the workers counted is what the requests' logs say.
        assert sum(proposed.drafted for proposed in cell.proposers.values()) == cell.drafted_tokens
        assert len(cell.ratios) == cell.speed_up.n <= PAIRS
    assert any(cell.drafted_tokens for cell in report.cells)
    assert report.facts["seed"] == 3
    down = [sys.executable, "-m", "services.cli", "status"]
    home = {**env, "HEADRACE_HOME": str(place / "home")}
    assert subprocess.run(down, env=home, capture_output=True, timeout=60, check=False).returncode != 0
