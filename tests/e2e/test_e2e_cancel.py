"""Cancelled requests, late ones and those whose client left stop wherever they are; drained work goes on elsewhere."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.bus import Bus, LogEntry, LogState
from shared.protocol.records import Ended, HandedBack, Record, Tokens
from tests.e2e.conftest import MODEL, Stack

LONG_TOKENS = 4000
CHUNK_TOKENS = 256
PATIENCE_S = 60.0
COMPLETIONS = "/v1/completions"


def prompt_of(tokens: int) -> list[int]:
    """A prompt that no cache knows."""
    salt = time.time_ns()
    return [1000 + (salt * 31 + i * i * 7 + i * (salt % 97)) % 40_000 for i in range(tokens)]


def body(prompt: list[int], output: int = 16, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": output,
        "ignore_eos": True,
        "seed": 3,
        "temperature": 0.8,
        **fields,
    }


def eventually(check: Callable[[], bool], what: str, within_s: float = PATIENCE_S) -> None:
    give_up = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < give_up, f"not within {within_s:.0f} s: {what}"
        time.sleep(0.05)


class Running:
    """A streamed completion in progress; `stop` leaves it as a client that goes away."""

    def __init__(self, stack: Stack, fields: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self._client = httpx.Client(base_url=stack.url, timeout=PATIENCE_S)
        self._stream = self._client.stream("POST", COMPLETIONS, json=fields | {"stream": True}, headers=headers or {})
        response = self._stream.__enter__()
        assert response.status_code == 200
        self.request_id = response.headers["x-headrace-request-id"]
        self.lines = response.iter_lines()

    def until_tokens(self, events: int) -> None:
        while events:
            events -= next(self.lines).startswith("data:")

    def text(self) -> str:
        """The rest."""
        return "\n".join(self.lines)

    def stop(self) -> None:
        self._stream.__exit__(None, None, None)
        self._client.close()


class Logs:
    """Reads requests' logs."""

    def __init__(self, stack: Stack) -> None:
        self._url = stack.nats_url

    def entries(self, request_id: str) -> list[LogEntry]:
        async def read() -> list[LogEntry]:
            async with await Bus.connect(self._url, name="test") as bus:
                return await bus.open_log("default", request_id).read()

        return asyncio.run(read())

    def queued(self) -> int:
        """Messages in all work queues, pulled ones included."""

        async def read() -> int:
            async with await Bus.connect(self._url, name="test") as bus:
                streams = await bus.js.streams_info()
                queues = [s for s in streams if s.config.retention == "workqueue"]
                return sum(queue.state.messages for queue in queues)

        return asyncio.run(read())

    def records(self, request_id: str) -> list[Record]:
        return [entry.record for entry in self.entries(request_id)]

    def state(self, request_id: str) -> LogState:
        return LogState.replay(self.entries(request_id))


@pytest.fixture
def logs(stack: Stack) -> Logs:
    return Logs(stack)


@pytest.fixture(autouse=True)
def nothing_is_left(stack: Stack) -> Iterator[None]:
    """After each test: no holders, no queued work, all blocks free, no leases."""
    yield
    stack.wait_ready()
    stack.wait_until_idle()
    eventually(lambda: not any(store.get("leases") for store in stack.instances("kvstore")), "no leases")


def complete(stack: Stack, fields: dict[str, Any]) -> str:
    """The id of a finished completion."""
    answer = httpx.post(f"{stack.url}{COMPLETIONS}", json=fields, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def computed_tokens(metrics_url: str, stage: str) -> float:
    """Rows that the stage's engine has computed, whoever asked for them."""
    text = httpx.get(metrics_url, timeout=10).text
    (value,) = re.findall(rf'^headrace_engine_batch_tokens_sum{{stage="{stage}"}} (\S+)$', text, re.MULTILINE)
    return float(value)


def exits_of(stack: Stack, instance: str) -> list[int]:
    """The exit statuses of an instance's runs so far, as the supervisor saw them."""
    text = (Path(stack.env["HEADRACE_HOME"]) / "logs" / "supervisor.log").read_text()
    return [int(status) for status in re.findall(rf"exited: {instance} \(exit status (\d+)", text)]


def cancel(stack: Stack, request_id: str, how: str = "DELETE") -> None:
    path = f"{stack.url}{COMPLETIONS}/{request_id}"
    answer = httpx.delete(path, timeout=10) if how == "DELETE" else httpx.post(f"{path}/cancel", timeout=10)
    assert answer.status_code == 200, answer.text


def assert_cancelled(records: list[Record], tokens: int | None = None) -> None:
    """One terminal record, the last; no tokens but those before it."""
    assert [type(record) for record in records].count(Ended) == 1
    last = records[-1]
    assert isinstance(last, Ended)
    assert last.reason == "cancelled"
    written = sum(len(record.ids) for record in records if isinstance(record, Tokens))
    assert last.usage.completion_tokens == written
    if tokens is not None:
        assert written == tokens


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_short_request_behind_a_cancelled_long_one_is_served_as_if_that_had_never_come(
    stack: Stack, logs: Logs
) -> None:
    (prefill,) = stack.instances("prefill")
    short = body(prompt_of(100))
    undisturbed = logs.state(complete(stack, short)).output_ids
    before = computed_tokens(prefill["metrics_url"], "prefill")
    long = Running(stack, body(prompt_of(LONG_TOKENS)))
    assert logs.state(long.request_id).accepted.prompt_tokens == LONG_TOKENS  # type: ignore[union-attr]
    eventually(lambda: computed_tokens(prefill["metrics_url"], "prefill") >= before + 2 * CHUNK_TOKENS, "two chunks")
    with ThreadPoolExecutor(1) as pool:
        behind = pool.submit(complete, stack, short)
        cancel(stack, long.request_id, "POST")
        served = behind.result()
    assert logs.state(served).output_ids == undisturbed
    stack.wait_until_idle()
    after = computed_tokens(prefill["metrics_url"], "prefill")
    assert after - before < LONG_TOKENS / 2, "it was let go in the middle"
    time.sleep(2)
    assert computed_tokens(prefill["metrics_url"], "prefill") == after
    assert_cancelled(logs.records(long.request_id), tokens=0)
    assert "cancelled" in long.text()
    long.stop()


@pytest.mark.parametrize(("stage", "tokens"), [("prefill", 0), ("decode", 1)])
def test_a_request_that_is_cancelled_while_it_waits_for_a_stage_is_never_taken_up(
    stack: Stack, logs: Logs, stage: str, tokens: int
) -> None:
    pid = stack.pid_of(f"{stage}-0")
    with stopped(pid):
        waiting = Running(stack, body(prompt_of(40)))
        eventually(lambda: len(logs.state(waiting.request_id).output_ids) == tokens, "it waits")
        if stage == "decode":
            eventually(lambda: logs.queued() == 1, "handed over")
        cancel(stack, waiting.request_id)
        assert logs.queued() == 0
    stack.wait_until_idle()
    records = logs.records(waiting.request_id)
    assert_cancelled(records, tokens)
    assert stage not in [claim.stage for claim in LogState.replay(logs.entries(waiting.request_id)).claims]
    waiting.stop()


@pytest.mark.parametrize("how", ["DELETE", "POST", "the client leaves"])
def test_a_request_that_is_cancelled_while_it_decodes_stops_decoding(stack: Stack, logs: Logs, how: str) -> None:
    running = Running(stack, body(prompt_of(40), output=3000))
    eventually(lambda: len(logs.state(running.request_id).output_ids) > 5, "it decodes")
    if how == "the client leaves":
        running.stop()
    else:
        cancel(stack, running.request_id, how)
        assert "cancelled" in running.text()
        running.stop()
    stack.wait_until_idle()
    assert_cancelled(logs.records(running.request_id))


def test_a_client_that_leaves_before_its_whole_answer_is_there_stops_the_work(stack: Stack, logs: Logs) -> None:
    decode = stack.instances("decode")[0]
    fields = body(prompt_of(40), output=3000)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{stack.url}{COMPLETIONS}", json=fields, timeout=3)
    stack.wait_until_idle()
    after = computed_tokens(decode["metrics_url"], "decode")
    time.sleep(1)
    assert computed_tokens(decode["metrics_url"], "decode") == after


def test_a_prompt_that_is_not_computed_in_time_is_given_up(stack: Stack, logs: Logs) -> None:
    (prefill,) = stack.instances("prefill")
    before = computed_tokens(prefill["metrics_url"], "prefill")
    late = Running(stack, body(prompt_of(LONG_TOKENS)), headers={"x-headrace-timeout-s": "3"})
    assert "deadline_exceeded" in late.text()
    stack.wait_until_idle()
    after = computed_tokens(prefill["metrics_url"], "prefill")
    assert CHUNK_TOKENS <= after - before < LONG_TOKENS
    time.sleep(2)
    assert computed_tokens(prefill["metrics_url"], "prefill") == after
    records = logs.records(late.request_id)
    assert [type(record) for record in records].count(Ended) == 1
    assert not any(isinstance(record, Tokens) for record in records)
    late.stop()


@pytest.mark.slow
def test_a_prefill_worker_that_is_stopped_in_mid_prompt_hands_it_back(stack: Stack, logs: Logs) -> None:
    fields = body(prompt_of(1000))
    (prefill,) = stack.instances("prefill")
    before = computed_tokens(prefill["metrics_url"], "prefill")
    running = Running(stack, fields)
    eventually(lambda: computed_tokens(prefill["metrics_url"], "prefill") > before, "the first chunk")
    os.kill(prefill["pid"], signal.SIGTERM)
    assert "[DONE]" in running.text()
    state = logs.state(running.request_id)
    records = logs.records(running.request_id)
    assert [claim.stage for claim in state.claims] == ["prefill", "prefill", "decode"]
    assert sum(isinstance(record, HandedBack) for record in records) == 1
    running.stop()
    assert logs.state(complete(stack, fields)).output_ids == state.output_ids
    eventually(lambda: exits_of(stack, "prefill-0")[-1:] == [0], "it ends in good order")


@pytest.mark.slow
def test_streams_of_a_decode_worker_that_is_stopped_go_on_at_another(stack: Stack, logs: Logs) -> None:
    requests = [body(prompt_of(30), output=96, seed=seed) for seed in range(4)]
    stack.headrace("scale", "decode=2")
    try:
        pids = {entry["instance"]: entry["pid"] for entry in stack.instances("decode")}
        with ThreadPoolExecutor(len(requests)) as pool:
            undisturbed = [
                logs.state(request_id).output_ids
                for request_id in pool.map(lambda fields: complete(stack, fields), requests)
            ]
            streams = [Running(stack, fields) for fields in requests]
            for stream in streams:
                stream.until_tokens(3)
            leaving = logs.state(streams[0].request_id).claims[-1].worker.rpartition(".")[0]
            os.kill(pids[leaving], signal.SIGTERM)
            texts: list[Future[str]] = [pool.submit(stream.text) for stream in streams]
            assert all("[DONE]" in text.result() for text in texts)
        moved = 0
        for stream, ids in zip(streams, undisturbed, strict=True):
            state, records = logs.state(stream.request_id), logs.records(stream.request_id)
            assert state.output_ids == ids
            decoders = [claim.worker for claim in state.claims if claim.stage == "decode"]
            moved += len(decoders) > 1
            assert sum(isinstance(record, HandedBack) for record in records) == len(decoders) - 1
            stream.stop()
        assert moved
        eventually(lambda: exits_of(stack, leaving)[-1:] == [0], "it ends in good order")
    finally:
        stack.headrace("scale", "decode=1")
        stack.wait_ready()
