"""Traces over real OTLP and real processes: the tree, the links, and what happens without a collector."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.otlp_receiver import (
    OtlpReceiver,
    children,
    orphans,
    otlp_grpc_receiver,
    otlp_http_receiver,
    render_tree,
)

PROGRAM = Path(__file__).with_name("telemetry_program.py")
REMOTE_TRACE = "0af7651916cd43dd8448eb211c80319c"
REMOTE_SPAN = "b7ad6b7169203331"


def run(name: str, environment: Mapping[str, str], **arguments: Any) -> list[str]:
    """Output lines of one program, in an environment free of the tester's own OTEL_ variables."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    command = [sys.executable, str(PROGRAM), name, json.dumps(arguments)]
    done = subprocess.run(
        command, env=clean | dict(environment), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@contextmanager
def collector_that_never_answers() -> Iterator[str]:
    """Accepts connections (the kernel does) and stays silent."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(params=[otlp_http_receiver, otlp_grpc_receiver], ids=["http", "grpc"])
def receiver(request: pytest.FixtureRequest) -> Iterator[OtlpReceiver]:
    make: Callable[[], AbstractContextManager[OtlpReceiver]] = request.param
    with make() as running:
        yield running


def test_one_trace_crosses_three_processes_and_a_redelivery(receiver: OtlpReceiver) -> None:
    run("gateway", receiver.environment)
    spans = receiver.wait_for(lambda spans: len(spans) >= 6)

    assert len({span.trace_id for span in spans}) == 1
    assert not orphans(spans)
    assert render_tree(spans) == "\n".join(
        [
            "headrace-gateway: chat smollm2",
            "  headrace-prefill: queue",
            "  headrace-prefill: prefill",
            "    headrace-prefill: prefill chunk",
            "  headrace-prefill: decode",
            "  headrace-decode: decode",
        ]
    )
    root = next(span for span in spans if not span.parent_id)
    assert root.attributes["gen_ai.operation.name"] == "chat"
    assert root.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert root.attributes["headrace.request_id"] == "req-1"
    first, second = sorted(
        (span for span in children(spans, root) if span.name == "decode"),
        key=lambda span: span.attributes["headrace.epoch"],
    )
    assert second.links == ((first.trace_id, first.span_id),)
    assert (second.instance, second.resource["service.namespace"]) == ("decode-1", "headrace")
    queue = next(span for span in spans if span.name == "queue")
    assert root.start_ns <= queue.start_ns <= queue.end_ns <= root.end_ns


def test_without_an_endpoint_nothing_is_recorded_and_a_callers_trace_passes_through() -> None:
    report = json.loads(run("state", {})[-1])
    assert not report["recording"]
    assert report["threads"] == 1
    assert report["exporters"] == []
    assert report["headers"]["traceparent"] == f"00-{REMOTE_TRACE}-{REMOTE_SPAN}-01"


@pytest.mark.parametrize(
    "switch",
    [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_TRACES_SAMPLER": "always_off"}],
    ids=["disabled", "no exporter", "sampler"],
)
def test_standard_variables_switch_traces_off(switch: dict[str, str]) -> None:
    with otlp_http_receiver() as receiver:
        report = json.loads(run("state", receiver.environment | switch)[-1])
        assert not report["recording"]
        assert receiver.spans == []
    if "OTEL_TRACES_SAMPLER" not in switch:  # nothing was even loaded
        assert (report["threads"], report["exporters"]) == (1, [])


def test_the_variables_for_traces_win_over_the_general_ones() -> None:
    with otlp_grpc_receiver() as receiver:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": receiver.endpoint,
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
            "OTEL_SERVICE_NAME": "mine",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=lab",
        }
        run("state", environment)
        (span,) = receiver.wait_for_names(["work"])
        assert (span.trace_id, span.parent_id) == (REMOTE_TRACE, REMOTE_SPAN)
        assert (span.service, span.resource["deployment.environment.name"]) == ("mine", "lab")


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
@pytest.mark.parametrize("fault", ["refuses", "never answers"])
def test_a_dead_collector_costs_only_spans(protocol: str, fault: str) -> None:
    """The exporter's time-out is longer than the test's: a caller that waited for the collector would not get here."""
    limits = {
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_EXPORTER_OTLP_TIMEOUT": "600",
        "OTEL_BSP_MAX_QUEUE_SIZE": "1000",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "500",
    }
    with collector_that_never_answers() as silent:
        endpoint = "http://127.0.0.1:1" if fault == "refuses" else silent
        lines = [
            json.loads(line) for line in run("flood", limits | {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}, spans=20_000)
        ]
    assert lines[-1]["event"] == "flooded"
    assert lines[-1]["kept"] <= 1000 + 2 * 500
    assert not lines[-1]["flushed"]
    complaints = [line for line in lines if line["level"] in ("warning", "error")]
    assert len(complaints) <= 5, complaints


def test_a_collector_that_rejects_every_batch_is_complained_about_once() -> None:
    limits = {"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "50", "OTEL_BSP_SCHEDULE_DELAY": "10"}
    with otlp_http_receiver(status=400) as receiver:
        lines = [json.loads(line) for line in run("flood", receiver.environment | limits, spans=20_000)]
    assert receiver.requests > 5
    assert len([line for line in lines if line["level"] in ("warning", "error")]) <= 3


@pytest.mark.parametrize(
    ("setting", "still_traced"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "carrier-pigeon"}, True),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "0"}, False),
        ({"OTEL_TRACES_SAMPLER": "sometimes"}, True),
    ],
    ids=["protocol", "queue", "sampler"],
)
def test_an_unusable_setting_never_keeps_a_service_from_starting(setting: dict[str, str], still_traced: bool) -> None:
    with otlp_http_receiver() as receiver:
        assert json.loads(run("state", receiver.environment | setting)[-1])["recording"] is still_traced
