"""The root span of a request, as a collector receives it, and the context that goes on with the work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.integration.gateway_harness import (
    PATIENCE_S,
    GatewayProcess,
    Worker,
    chat_body,
    fresh_seed,
    make_model,
)
from tests.integration.otlp_receiver import OtlpReceiver, otlp_http_receiver

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpReceiver]:
    with otlp_http_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def gateway(
    collector: OtlpReceiver, nats_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    directory: Path = tmp_path_factory.mktemp("gateway-traces")
    process = GatewayProcess(nats_url, make_model(directory / "tiny"), directory, env=collector.environment).start()
    yield process
    assert process.stop() == 0


@pytest_asyncio.fixture(scope="module")
async def worker(nats_url: str) -> AsyncIterator[Worker]:
    async with Worker.running(nats_url, "tiny") as running:
        yield running


async def test_the_root_span_tells_the_request_and_its_context_goes_on_with_the_work(
    gateway: GatewayProcess, worker: Worker, collector: OtlpReceiver
) -> None:
    seed = fresh_seed()
    worker.reserve(seed)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=PATIENCE_S) as http:
        waiting = asyncio.create_task(
            http.post(
                "/v1/chat/completions",
                json=chat_body(seed, temperature=0.5),
                headers={"traceparent": f"00-{TRACE}-{CALLER}-01"},
            )
        )
        work = await worker.take(seed)
        await work.claim()
        await work.say("a", "b")
        await work.end("length")
        answer = await waiting
    spans = await asyncio.to_thread(collector.wait_for_names, ["chat tiny"])
    span = next(span for span in spans if span.trace_id == TRACE)
    assert (span.parent_id, span.kind.lower().endswith("server"), span.failed) == (CALLER, True, False)
    assert {span.name for span in spans} <= {"chat tiny", "text_completion tiny"}  # and nothing of the framework's
    wanted = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.seed": seed,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.id": answer.json()["id"],
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 2,
        "headrace.tenant": "default",
        "headrace.spec.accepted_tokens": 5,
    }
    assert wanted.items() <= span.attributes.items()
    assert list(span.attributes["gen_ai.response.finish_reasons"]) == ["length"]
    assert work.delivery.headers["traceparent"] == f"00-{TRACE}-{span.span_id}-01"
    assert not any(value == "hi" for value in span.attributes.values())


async def test_a_refused_request_has_a_span_with_its_error_code(
    gateway: GatewayProcess, worker: Worker, collector: OtlpReceiver
) -> None:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=PATIENCE_S) as http:
        await http.post("/v1/completions", json={"model": "tiny", "prompt": "x", "echo": True})
    spans = await asyncio.to_thread(collector.wait_for_names, ["text_completion tiny"])
    span = next(span for span in spans if span.name == "text_completion tiny")
    assert (span.attributes["error.type"], span.failed) == ("unsupported_parameter", False)
