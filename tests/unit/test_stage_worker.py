"""A worker whose engine cannot compute any more takes no work and ends its process; what decode knows of a job."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from services.decode.worker import _assumed
from shared.bus import Bus, Delivery, WorkQueue
from shared.engine import EngineStopped
from shared.protocol.blocks import Manifest
from shared.protocol.jobs import DecodeJob, GenerationRequest, SamplingParams, decode_job, encode_work
from shared.settings import EngineSettings
from shared.telemetry.metrics import QueueMetrics
from shared.worker import stage_worker
from shared.worker.engine_host import EngineHost
from shared.worker.holding import Holding, WorkerUnfit, deadline_of
from shared.worker.reporting import Reporter
from shared.worker.stage_worker import StageWorker, Work

REQUEST = GenerationRequest(
    "r", "t", "m", "chat", "normal", [1, 2, 3], SamplingParams(4, 1), 0.0, 50.0, 1000.0, 1, compute_timeout_s=30.0
)


class Worker(StageWorker):
    def _queue(self) -> WorkQueue:
        raise AssertionError("a worker without an engine does not pull")

    def _read(self, delivery: Delivery) -> Work:
        raise AssertionError("a worker without an engine does not read")


def worker_on(host: object) -> Worker:
    async def on_dropped(_: str) -> None:
        pass

    return Worker(
        "decode",
        cast(Bus, None),
        cast(EngineHost, host),
        "decode-0.a",
        QueueMetrics("decode", CollectorRegistry()),
        slots=4,
        stall_s=10.0,
        drain_s=1.0,
        on_dropped=on_dropped,
    )


@pytest.mark.parametrize("fault", ["engine_dead", "engine_broken"])
async def test_a_worker_without_a_usable_engine_pulls_nothing_and_ends(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Exited(Exception):
        pass

    def exit_now(event: str, **_: Any) -> None:
        raise Exited(event)

    monkeypatch.setattr(stage_worker, "_exit_now", exit_now)
    monkeypatch.setattr(stage_worker, "STALL_CHECK_S", 0.01)
    made = worker_on(SimpleNamespace(fault=fault, progress_unix_s=time.time()))
    async with asyncio.timeout(5):
        await made._pull(cast(WorkQueue, None), cast(asyncio.TaskGroup, None))
        with pytest.raises(Exited, match=fault):
            await made._exit_when_hung()


def test_a_workers_status_tells_its_last_error_and_when_that_was() -> None:
    named = {"layout": SimpleNamespace(layout_id="l"), "model": SimpleNamespace(name="m")}
    made = worker_on(SimpleNamespace(pool=None, progress_unix_s=time.time(), **named))
    reporter = Reporter("decode", cast(EngineSettings, SimpleNamespace(instance="decode-0")), 4, "")
    reporter.ready(
        made._host,
        made.holdings,
        lambda: (made.last_error, made.last_error_unix_s),
        lambda: "tcp",
    )
    assert (reporter.report().last_error, reporter.report().last_error_unix_s) == ("", 0.0)
    began = time.time()
    made._note("fetch_failed", RuntimeError("no route"))
    told = reporter.report()
    assert told.last_error == "no route"
    assert began <= told.last_error_unix_s <= time.time()


async def test_an_engine_that_stopped_is_the_workers_fault() -> None:
    async def serve(_: Holding) -> None:
        raise EngineStopped("the engine's thread is not running")

    work = Work(REQUEST, _assumed(job(0.0)), serve)
    with pytest.raises(WorkerUnfit, match="not running"):
        await stage_worker._blameless(work, cast(Holding, None))


def job(first_claim_unix_s: float) -> DecodeJob:
    return DecodeJob(REQUEST, Manifest("l", 3, []), [7], 2, 9, 120.0, first_claim_unix_s=first_claim_unix_s)


def test_compute_time_goes_on_through_the_hand_over() -> None:
    state = _assumed(decode_job(encode_work(job(100.0))))
    assert deadline_of(REQUEST, state, 120.0) == 130.0
    assert (state.epoch, state.last_seq, state.output_ids, state.unproductive) == (2, 9, [7], [])
    assert deadline_of(REQUEST, _assumed(job(0.0)), 120.0) == 150.0, "a job of a version that did not tell"
