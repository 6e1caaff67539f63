"""From starting a process to an engine that is ready, and the memory it holds. Each in a new process."""

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median

import msgspec

from loadgen.engine_bench.errors import MeasurementError
from loadgen.engine_bench.plan import Plan
from loadgen.engine_bench.section import Line, Section
from loadgen.engine_bench.startup_probe import Findings, Order
from loadgen.engine_bench.subjects import PACKED, Subjects
from shared.engine.config import Dtype

KV_BYTES = 512 << 20
_TIMEOUT_S = 300.0
_MIB = 1 << 20


def measure(subjects: Subjects, plan: Plan) -> Section:
    """Raises MeasurementError."""
    runs: dict[Dtype, list[Findings]] = {dtype: [] for dtype in PACKED}
    for _ in range(plan.long_rounds):
        for dtype, found in runs.items():
            found.append(_run(subjects, dtype))
    last = [found[-1] for found in runs.values()]
    held = [f.weights.held + f.kv_bytes for f in last]
    most_beside = [(f.used.most - h) / _MIB for f, h in zip(last, held, strict=True)]
    lines = [
        Line("start to imported", "s", [median(f.imported_s for f in found) for found in runs.values()]),
        Line("start to loaded", "s", [median(f.loaded_s for f in found) for found in runs.values()]),
        Line("weights", "MiB", [f.weights.plain / _MIB for f in last]),
        Line("weights in packed blocks", "MiB", [f.weights.held / _MIB for f in last]),
        Line("KV cache", "MiB", [f.kv_bytes / _MIB for f in last]),
        Line("resident after the imports", "MiB", [f.imported.now / _MIB for f in last]),
        Line("resident after loading", "MiB", [f.loaded.now / _MIB for f in last]),
        Line("resident, all KV and a chunk used", "MiB", [f.used.now / _MIB for f in last]),
        Line("files and libraries in it", "MiB", [f.used.files / _MIB for f in last]),
        Line("most resident until then", "MiB", [f.used.most / _MIB for f in last]),
        Line("the most less packed weights and KV", "MiB", most_beside),
    ]
    note = "The model is on disk in the cache. KV memory is mapped at first use."
    return Section("startup", "start-up and memory", list(PACKED), lines, [note])


def _run(subjects: Subjects, dtype: Dtype) -> Findings:
    order = Order(subjects.model, dtype, subjects.threads, KV_BYTES, time.monotonic())
    command = [sys.executable, "-m", "loadgen.engine_bench.startup_probe", msgspec.json.encode(order).decode()]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)  # noqa: S603 - our own
    except subprocess.TimeoutExpired as error:
        raise MeasurementError(f"an engine with {dtype} was not ready after {_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        reason = (done.stderr.decode(errors="replace").strip().splitlines() or ["no word"])[-1]
        raise MeasurementError(f"the process that loads {dtype} ended with {done.returncode}: {reason}")
    return msgspec.json.decode(done.stdout, type=Findings)
