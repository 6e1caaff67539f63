"""A process of its own that loads an engine, uses all of its memory, and says how long it took and what it holds."""

from __future__ import annotations

import sys
import time

import msgspec

from loadgen.engine_bench.memory import Resident, Weights, resident, weight_bytes
from loadgen.engine_bench.prefill import prefill
from loadgen.engine_bench.subjects import Subjects
from shared.engine.config import Dtype


class Order(msgspec.Struct, frozen=True):
    """`began_s` is the time on the monotonic clock, which all processes share, at which this one was started."""

    model: str
    dtype: Dtype
    threads: int
    kv_bytes: int
    began_s: float


class Findings(msgspec.Struct, frozen=True):
    """Memory after the imports, after loading, and after all of the KV cache was written and a full chunk of a prompt
    was computed.
    """

    imported_s: float
    loaded_s: float
    imported: Resident
    loaded: Resident
    used: Resident
    weights: Weights
    kv_bytes: int


def probe(order: Order) -> Findings:
    """Raises EngineError, ModelNotFound, MeasurementError."""
    imported_s = time.monotonic() - order.began_s
    imported = resident()
    subjects = Subjects(order.model, order.threads, order.kv_bytes)
    engine = subjects.engine(order.dtype)
    loaded_s = time.monotonic() - order.began_s
    loaded = resident()
    for block_id in range(engine.pool.num_blocks):
        engine.block_buffer(block_id).fill(0)
    runner, chunk = subjects.runner(order.dtype), engine.config.max_batch_tokens
    prefill(runner, [1] * chunk, chunk)
    used = resident()
    return Findings(
        imported_s=imported_s,
        loaded_s=loaded_s,
        imported=imported,
        loaded=loaded,
        used=used,
        weights=weight_bytes(runner.model.module),
        kv_bytes=engine.pool.num_blocks * engine.layout.block_bytes,
    )


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(probe(msgspec.json.decode(sys.argv[1], type=Order))))
