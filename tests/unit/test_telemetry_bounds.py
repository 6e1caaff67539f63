"""Log values and exceptions are bounded and hold no content; metrics and headers keep their names."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from types import SimpleNamespace
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from prometheus_client import CollectorRegistry, Histogram

from shared.telemetry import (
    LoopLagMonitor,
    MetricsServerFailed,
    extract_context,
    render_metrics,
    serve_metrics,
    trace_ids,
)
from shared.telemetry import logging as telemetry_logging
from shared.telemetry.metrics import DecodeMetrics, DraftMetrics, GatewayMetrics, KVStoreMetrics, PrefillMetrics
from shared.telemetry.tracebacks import MAX_EXCEPTIONS, describe_exception

values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(alphabet=st.characters()) | st.binary(),
    lambda inner: st.lists(inner, max_size=40) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=60,
)


def rendered(event: dict[str, Any]) -> str:
    return telemetry_logging._render_json(None, "info", telemetry_logging._bound_values(None, "info", event))


@given(st.dictionaries(st.text(min_size=1, max_size=8).filter(lambda key: key != "exc_info"), values, max_size=60))
def test_any_event_becomes_one_bounded_json_line(event: dict[str, Any]) -> None:
    line = rendered({"event": "x", **event})
    assert "\n" not in line
    assert isinstance(json.loads(line), dict)
    assert len(json.loads(line)) <= telemetry_logging.MAX_KEYS + 3


@pytest.mark.parametrize("key", sorted(telemetry_logging.CONTENT_KEYS))
def test_content_keys_are_withheld(key: str) -> None:
    assert "SECRET" not in rendered({"event": "x", key: "SECRET"})


@pytest.mark.parametrize(
    "value", [SimpleNamespace(a="SECRET"), {"a": "SECRET"}, [["SECRET"]], b"SECRET", [{"a": "SECRET"}]]
)
def test_only_scalars_and_flat_lists_of_them_are_shown(value: object) -> None:
    assert "SECRET" not in rendered({"event": "x", "value": value})


def test_long_values_are_cut_and_say_by_how_much() -> None:
    line = json.loads(rendered({"event": "e" * 5000, "value": "v" * 5000, "ids": list(range(1000))}))
    assert line["value"].endswith("(4488 more)")
    assert line["event"].endswith("(3976 more)")
    assert line["ids"][-1] == "(984 more)"


def test_an_exception_that_quotes_its_input_is_named_without_the_quote() -> None:
    class Body(pydantic.BaseModel):
        n: int

    with pytest.raises(pydantic.ValidationError) as caught:
        Body.model_validate({"n": "SECRET"})
    text = describe_exception(caught.value)
    assert text.startswith("ValidationError (message withheld)")


def test_causes_and_groups_are_told_and_bounded() -> None:
    members = [ValueError(f"number {n}") for n in range(50)]
    cause = KeyError("root")
    group = ExceptionGroup("many", members)
    group.__cause__ = cause
    text = describe_exception(group)
    assert "caused by KeyError: 'root'" in text
    assert "in the group: ValueError: number 0" in text
    assert text.count("Error:") <= MAX_EXCEPTIONS


def test_an_exception_that_is_its_own_context_ends() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__context__, second.__context__ = second, first
    assert describe_exception(first).count("ValueError") == 2


@pytest.mark.parametrize(
    "headers", [None, {}, {"traceparent": "nonsense"}, {"traceparent": "00-0-0-01"}, {"other": "x"}]
)
def test_headers_without_a_good_trace_start_a_new_one(headers: dict[str, str] | None) -> None:
    """Even inside a span: a worker that happens to be in one must not adopt a stranger's message."""
    around = SpanContext(trace_id=1, span_id=1, is_remote=False, trace_flags=TraceFlags(1))
    with trace.use_span(NonRecordingSpan(around)):
        assert trace_ids() != {}
        assert trace_ids(extract_context(headers)) == {}


def test_headers_are_found_in_any_case() -> None:
    assert trace_ids(extract_context({"TRACEPARENT": f"00-{'a' * 32}-{'b' * 16}-01"})) == {
        "trace_id": "a" * 32,
        "span_id": "b" * 16,
    }


def test_metrics_keep_their_names() -> None:
    """Dashboards and alerts match on these."""
    families: set[str] = set()
    for make in (GatewayMetrics, PrefillMetrics, DecodeMetrics, DraftMetrics, KVStoreMetrics):
        registry = CollectorRegistry()
        make("x-0", registry)
        families |= {metric.name for metric in registry.collect()}
    assert families >= {
        "headrace_time_to_first_token_seconds",
        "headrace_inter_token_latency_seconds",
        "headrace_e2e_request_latency_seconds",
        "headrace_request_queue_time_seconds",
        "headrace_num_requests_running",
        "headrace_num_requests_waiting",
        "headrace_kv_cache_usage_perc",
        "headrace_prefix_cache_queries",
        "headrace_prefix_cache_hits",
        "headrace_prompt_tokens",
        "headrace_generation_tokens",
        "headrace_request_success",
        "headrace_spec_decode_num_draft_tokens",
        "headrace_spec_decode_num_accepted_tokens",
        "headrace_spec_decode_num_wasted_tokens",
        "headrace_spec_decode_num_drafts",
        "headrace_spec_decode_num_draft_tokens_per_pos",
        "headrace_spec_decode_num_accepted_tokens_per_pos",
        "headrace_spec_decode_num_guesses",
        "headrace_spec_decode_num_late_guesses",
        "headrace_spec_decode_num_sequence_steps",
        "headrace_spec_decode_num_ready_sequence_steps",
        "headrace_spec_decode_draft_length",
        "headrace_spec_decode_drafters_asked",
        "headrace_kv_transfer_bytes",
        "headrace_kv_transfer_seconds",
        "headrace_kv_blocks_hit",
        "headrace_kv_blocks_miss",
        "headrace_kv_blocks_checksum_failed",
        "headrace_kv_blocks_evicted",
        "headrace_event_loop_lag_seconds",
        "headrace_engine_step_seconds",
        "headrace_engine_batch_tokens",
        "headrace_request_claims",
    }


def test_metrics_are_served_and_the_port_is_freed() -> None:
    registry = CollectorRegistry()
    metrics = DecodeMetrics("decode-0", registry)
    metrics.kv.observe_transfer("store_to_decode", "ucx", 1024, 0.01)
    metrics.speculation.observe("ngram", drafted=4, accepted=3)
    server = serve_metrics(registry=registry)
    with urllib.request.urlopen(server.url, timeout=10) as answer:
        text = answer.read().decode()
    assert 'headrace_kv_transfer_bytes_total{hop="store_to_decode",transport="ucx"} 1024.0' in text
    assert 'headrace_spec_decode_num_accepted_tokens_total{proposer="ngram"} 3.0' in text
    assert text == render_metrics(registry=registry)[0].decode()
    server.close()
    serve_metrics(port=server.port, registry=registry).close()


def test_a_port_in_use_is_a_named_error() -> None:
    server = serve_metrics(registry=CollectorRegistry())
    with pytest.raises(MetricsServerFailed, match=str(server.port)):
        serve_metrics(port=server.port, registry=CollectorRegistry())
    server.close()


async def test_blocking_the_loop_shows_as_lag() -> None:
    registry = CollectorRegistry()
    monitor = LoopLagMonitor(Histogram("lag", "lag", registry=registry), interval_s=0.01, blocked_s=0.2)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(monitor.run())
        await asyncio.sleep(0.05)
        time.sleep(0.3)  # noqa: ASYNC251 - the fault under test
        await asyncio.sleep(0.05)
        task.cancel()
    assert monitor.worst_s >= 0.2
    assert (registry.get_sample_value("lag_count") or 0) >= 2
