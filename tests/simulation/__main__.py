"""`python -m tests.simulation --seed N --trace`: one run and what happened in it; `--seeds N` runs many."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import Counter

from tests.simulation.mutants import MUTANTS
from tests.simulation.simulation import Result, run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the (first) seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds to run from there on")
    parser.add_argument("--mutant", choices=[mutant.__name__ for mutant in MUTANTS], help="put this bug into the code")
    parser.add_argument("--trace", action="store_true", help="print all that happens")
    parser.add_argument("--hashes", type=int, nargs="+", metavar="SEED", help="print the trace hash of each seed")
    asked = parser.parse_args()
    if asked.hashes:
        print("\n".join(run_seed(seed).trace_hash for seed in asked.hashes))
        return 0
    failed = 0
    counts: Counter[str] = Counter()
    began = time.process_time()
    mutant = next((mutant for mutant in MUTANTS if mutant.__name__ == asked.mutant), contextlib.nullcontext)
    for seed in range(asked.seed, asked.seed + asked.seeds):
        with mutant():
            result = run_seed(seed, verbose=asked.trace)
        failed += bool(result.failures)
        counts += result.counts
        report(result, asked.trace)
    took = time.process_time() - began
    print(f"{asked.seeds} runs, {failed} failed, {took:.1f} s CPU, {asked.seeds / max(took, 1e-9):.0f} runs a second")
    print("  ".join(f"{what}: {count}" for what, count in sorted(counts.items())))
    return 1 if failed else 0


def report(result: Result, trace: bool) -> None:
    for line in result.trace if trace else []:
        print(line)
    if result.failures or trace:
        print(f"seed {result.seed}: {result.virtual_s:.1f} s, {result.events} events, {result.trace_hash}")
        print(f"  faults: {', '.join(result.faults) or 'none'}")
        for failure in result.failures:
            print(f"  FAILED {failure}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
