"""The recovery logic in thousands of random interleavings, each of which its seed repeats exactly.

`HEADRACE_SIMULATION_SEEDS` runs more of them, from `HEADRACE_SIMULATION_FIRST` on.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.mutants import MUTANTS, THEMES_OF_RARE, Mutant
from tests.simulation.plan import THEMES, draw_plan
from tests.simulation.simulation import Result, run_seed

FIRST = int(os.environ.get("HEADRACE_SIMULATION_FIRST", "0"))
SEEDS = int(os.environ.get("HEADRACE_SIMULATION_SEEDS", "600"))
PART = 100
MUTANT_SEEDS = 800
"""Within so many runs each mutant must be found."""

ROOT = Path(__file__).parents[2]


def explained(failed: list[Result]) -> str:
    lines = [f"{len(failed)} runs broke a promise:"]
    for result in failed:
        lines += [f"  seed {result.seed} ({', '.join(result.faults) or 'no faults'}): {result.failures[0]}"]
        lines += [f"    again: python -m tests.simulation --seed {result.seed} --trace"]
    return "\n".join(lines)


@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS, PART), ids=lambda first: f"from-{first}")
def test_every_promise_is_kept_whatever_fails_and_in_whatever_order(first: int) -> None:
    last = min(first + PART, FIRST + SEEDS)
    failed = [result for seed in range(first, last) if (result := run_seed(seed, stop_at_failure=True)).failures]
    assert not failed, explained(failed)


def test_a_seed_gives_the_same_run_in_every_process() -> None:
    seeds = [next(seed for seed in range(1000) if draw_plan(seed).theme == theme) for theme in THEMES]
    here = [run_seed(seed).trace_hash for seed in seeds]
    assert here == [run_seed(seed).trace_hash for seed in seeds]
    command = [sys.executable, "-m", "tests.simulation", "--hashes", *map(str, seeds)]
    elsewhere = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": "4711"}, capture_output=True, text=True, check=True
    )
    assert elsewhere.stdout.split() == here


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_simulation_finds(mutant: Mutant) -> None:
    theme = THEMES_OF_RARE.get(mutant)
    seeds = (seed for seed in itertools.count() if theme in (None, draw_plan(seed).theme))
    for seed in itertools.islice(seeds, MUTANT_SEEDS):
        with mutant():
            if run_seed(seed, stop_at_failure=True).failures:
                break
    else:
        pytest.fail(f"{mutant.__name__} was not found in {MUTANT_SEEDS} runs")
    assert not run_seed(seed, stop_at_failure=True).failures, "the code fails without the mutant as well"
