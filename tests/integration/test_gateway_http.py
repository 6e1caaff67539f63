"""The gateway's HTTP API with real clients: OpenAI's answers, streams and refusals, to the letter."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, OpenAI

from tests.integration.gateway_harness import (
    PATIENCE_S,
    GatewayProcess,
    Worker,
    chat_body,
    events_of,
    fresh_seed,
    make_model,
    text_of,
    until,
)

HELLO = "Hello, wörld!"
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def gateway(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    directory = tmp_path_factory.mktemp("gateway-http")
    process = GatewayProcess(
        nats_url, make_model(directory / "tiny"), directory, max_body_bytes="20000", body_timeout_s="1"
    ).start()
    yield process
    assert process.stop() == 0


@pytest_asyncio.fixture(scope="module")
async def worker(nats_url: str) -> AsyncIterator[Worker]:
    async with Worker.running(nats_url, "tiny") as running:
        yield running


@pytest_asyncio.fixture
async def http(gateway: GatewayProcess, worker: Worker) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=PATIENCE_S) as client:
        yield client


@pytest_asyncio.fixture
async def client(gateway: GatewayProcess, worker: Worker) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE_S) as made:
        yield made


# Answers


async def test_the_async_openai_client_gets_a_whole_chat_answer_with_usage(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, seed=77)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.content == HELLO
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("u:hi\na:")
    assert answer.usage.completion_tokens == 4
    assert answer.usage.total_tokens == 11
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 5
    assert answer.usage.completion_tokens_details.rejected_prediction_tokens == 2
    assert answer.model_extra == {"seed": 77}


async def test_the_sync_openai_client_streams_a_chat(gateway: GatewayProcess, worker: Worker) -> None:
    def converse() -> list[Any]:
        with OpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0) as client:
            stream = client.chat.completions.create(
                model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
            )
            return list(stream)

    chunks = await asyncio.to_thread(converse)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == HELLO
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 5 + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 4
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_the_openai_client_sits_through_a_long_silence_between_tokens(
    start: Callable[..., GatewayProcess], worker: Worker
) -> None:
    """Comments keep the connection alive in every pause; none of them is an event, also after one with an id."""
    patient = start(ping_interval_s="0.05")
    seed = fresh_seed()
    worker.reserve(seed)
    async with AsyncOpenAI(base_url=f"{patient.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE_S) as client:
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, seed=seed)
        work = await worker.take(seed)
        await work.claim()
        for word in ("slow", "ly"):
            await asyncio.sleep(0.3)
            await work.say(word)
        await asyncio.sleep(0.3)
        await work.end()
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "slowly"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_the_openai_client_completes_text_and_token_ids_whole_and_streamed(
    client: AsyncOpenAI, worker: Worker
) -> None:
    for prompt in ("abc", ["abc"], [66, 67, 68], [[66, 67, 68]]):
        answer = await client.completions.create(model="tiny", prompt=prompt)
        assert answer.object == "text_completion"
        assert answer.choices[0].text == HELLO
        assert len(worker.seen[-1].prompt_ids) == 3
    assert worker.seen[-1].prompt_ids == [66, 67, 68]
    assert worker.seen[-1].params.max_tokens == 16
    stream = await client.completions.create(model="tiny", prompt="abc", stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == HELLO
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_every_sampling_parameter_reaches_the_worker(http: httpx.AsyncClient, worker: Worker) -> None:
    seed = fresh_seed()
    fields = {
        "max_completion_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "stop": ["END", "\n\n"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"7": -100, "8": 1.5},
        "min_tokens": 4,
        "logprobs": True,
        "top_logprobs": 3,
        "speculation": "off",
        "priority": "high",
        "user": "u1",
    }
    (await http.post("/v1/chat/completions", json=chat_body(seed, **fields))).raise_for_status()
    request = next(r for r in worker.seen if r.params.seed == seed)
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (9, 0.5, 0.9, 40, 0.05)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == (["END", "\n\n"], [3], True)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.25, -0.5, 1.5)
    assert (params.logit_bias, params.min_tokens, params.logprobs) == ({7: -100.0, 8: 1.5}, 4, 3)
    assert (request.speculation, request.priority, request.tenant, request.salt) == (
        "off",
        "high",
        "default",
        "default",
    )


async def test_a_prediction_reaches_the_worker_as_tokens_where_there_is_speculation(
    client: AsyncOpenAI, worker: Worker
) -> None:
    for text, speculation in (("int main", "auto"), ("int main\n" * 500, "auto"), ("int main", "off")):
        seed, room = fresh_seed(), len(text.encode()) <= 512
        asking = client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            seed=seed,
            prediction={"type": "content", "content": [{"type": "text", "text": text}]},
            extra_body={"speculation": speculation},
        )
        if not room:
            with pytest.raises(openai.BadRequestError) as caught:
                await asking
            assert (caught.value.param, caught.value.code) == ("prediction.content", "context_length_exceeded")
            continue
        await asking
        request = next(r for r in worker.seen if r.params.seed == seed)
        assert len(request.prediction_ids) == (len(text) if speculation == "auto" else 0)


async def test_text_parts_and_developer_messages_are_rendered(http: httpx.AsyncClient, worker: Worker) -> None:
    seed = fresh_seed()
    messages = [
        {"role": "developer", "content": "D"},
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
        {"role": "assistant", "content": "z", "tool_calls": None, "refusal": None},
        {"role": "user", "content": "ü"},
    ]
    (await http.post("/v1/chat/completions", json=chat_body(seed, messages=messages))).raise_for_status()
    request = next(r for r in worker.seen if r.params.seed == seed)
    assert len(request.prompt_ids) == len("s:D\nu:x\ny\na:z\nu:ü\na:".encode())


async def test_the_stream_on_the_wire_has_ids_and_closes_with_done(http: httpx.AsyncClient) -> None:
    body = chat_body(fresh_seed(), stream=True, stream_options={"include_usage": True})
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    events = events_of(answer.text)
    request_id = answer.headers["x-headrace-request-id"]
    assert events[-1] == (None, "[DONE]")
    assert text_of(events[:-1]) == HELLO
    ids = [event_id for event_id, _ in events[:-1]]
    assert all(event_id is not None and event_id.startswith(f"{request_id}:") for event_id in ids)
    assert len(set(ids)) == len(ids)
    assert {data["id"] for _, data in events[:-1]} == {request_id}


async def test_the_seed_is_drawn_and_told_when_the_client_gives_none(http: httpx.AsyncClient, worker: Worker) -> None:
    body = {"model": "tiny", "messages": MESSAGES}
    answers = [await http.post("/v1/chat/completions", json=body) for _ in range(2)]
    seeds = [answer.json()["seed"] for answer in answers]
    assert [int(answer.headers["x-headrace-seed"]) for answer in answers] == seeds
    assert seeds[0] != seeds[1]
    assert {r.params.seed for r in worker.seen} >= set(seeds)


async def test_every_response_carries_a_request_id(http: httpx.AsyncClient) -> None:
    for method, path in (("GET", "/v1/models"), ("GET", "/nope"), ("POST", "/v1/completions"), ("GET", "/healthz")):
        answer = await http.request(method, path, headers={"x-request-id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"
    for insane in (b"a b", b"x" * 200, "é".encode()):
        answer = await http.get("/healthz", headers={b"x-request-id": insane})
        assert answer.headers["x-request-id"].startswith("req_")


async def test_models_are_listed_and_described(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "headrace"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


async def test_probes_and_metrics_tell_how_the_gateway_is(http: httpx.AsyncClient) -> None:
    assert (await http.get("/healthz")).status_code == 200

    async def ready() -> bool:
        return (await http.get("/readyz")).status_code == 200

    await until(ready)
    assert (await http.get("/readyz")).json() == {"status": "ready", "model": "tiny", "missing": []}
    assert (await http.post("/v1/chat/completions", json=chat_body(fresh_seed()))).status_code == 200
    text = (await http.get("/metrics")).text
    for name in ("headrace_time_to_first_token_seconds_count", "headrace_generation_tokens_total"):
        line = next(line for line in text.splitlines() if line.startswith(name))
        assert float(line.split()[-1]) >= 1


# Refusals

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("path", "fields", "status", "param", "code"),
    [
        (CHAT, {"n": 9}, 400, "n", "invalid_value"),
        (CHAT, {"n": 0}, 400, "n", "invalid_value"),
        (CHAT, {"n": 2, "best_of": 3}, 400, "best_of", "unsupported_parameter"),
        (CHAT, {"tools": [{"type": "function"}]}, 400, "tools", "unsupported_parameter"),
        (CHAT, {"response_format": {"type": "json_object"}}, 400, "response_format", "unsupported_parameter"),
        (CHAT, {"logprobs": 3}, 400, "logprobs", "invalid_value"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "invalid_value"),
        (CHAT, {"top_logprobs": 3}, 400, "top_logprobs", None),
        (CHAT, {"presence_penalty": 2.5}, 400, "presence_penalty", "invalid_value"),
        (CHAT, {"frequency_penalty": -3}, 400, "frequency_penalty", "invalid_value"),
        (CHAT, {"repetition_penalty": 0}, 400, "repetition_penalty", "invalid_value"),
        (CHAT, {"logit_bias": {"257": 1}}, 400, "logit_bias", "invalid_value"),
        (CHAT, {"logit_bias": {"5": 200}}, 400, "logit_bias", "invalid_value"),
        (CHAT, {"min_tokens": 6, "max_tokens": 5}, 400, "min_tokens", "invalid_value"),
        (CHAT, {"min_tokens": 511}, 400, "min_tokens", "invalid_value"),
        (TEXT, {"min_tokens": 17}, 400, "min_tokens", "invalid_value"),
        (TEXT, {"logprobs": 6}, 400, "logprobs", "invalid_value"),
        (CHAT, {"whatever": 1}, 400, "whatever", "unknown_parameter"),
        (CHAT, {"temperature": 2.5}, 400, "temperature", "invalid_value"),
        (CHAT, {"temperature": "1"}, 400, "temperature", "invalid_value"),
        (CHAT, {"max_tokens": 0}, 400, "max_tokens", "invalid_value"),
        (CHAT, {"max_tokens": True}, 400, "max_tokens", "invalid_value"),
        (CHAT, {"seed": -1}, 400, "seed", "invalid_value"),
        (CHAT, {"stop": ["a"] * 5}, 400, "stop", "invalid_value"),
        (CHAT, {"stop_token_ids": [100_000]}, 400, "stop_token_ids", "invalid_value"),
        (CHAT, {"stream_options": {"include_usage": True}}, 400, "stream_options", None),
        (CHAT, {"messages": []}, 400, "messages", "invalid_value"),
        (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].role", "invalid_value"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
            "messages[0].content[0].type",
            "invalid_value",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]},
            400,
            "messages",
            None,
        ),
        (CHAT, {"model": "gpt-9"}, 404, "model", "model_not_found"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 600}]}, 400, "messages", "context_length_exceeded"),
        (CHAT, {"max_tokens": 510}, 400, "messages", "context_length_exceeded"),
        (TEXT, {"prompt": "x" * 5000}, 400, "prompt", "context_length_exceeded"),
        (TEXT, {"prompt": ""}, 400, "prompt", "invalid_value"),
        (TEXT, {"prompt": ["a", ""]}, 400, "prompt", "invalid_value"),
        (TEXT, {"prompt": ["a"] * 33}, 400, "prompt", "invalid_value"),
        (TEXT, {"prompt": ["a"] * 5, "n": 7}, 400, "prompt", "invalid_value"),
        (TEXT, {"prompt": ["a", "x" * 5000]}, 400, "prompt[1]", "context_length_exceeded"),
        (TEXT, {"prompt": [[1], [999_999]]}, 400, "prompt[1]", "invalid_value"),
        (TEXT, {"prompt": [1, 999_999]}, 400, "prompt", "invalid_value"),
        (TEXT, {"prompt": None}, 400, "prompt", "invalid_value"),
        (TEXT, {"echo": True}, 400, "echo", "unsupported_parameter"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(
    http: httpx.AsyncClient, path: str, fields: dict[str, Any], status: int, param: str, code: str | None
) -> None:
    base = chat_body(1) if path == CHAT else {"model": "tiny", "prompt": "x"}
    answer = await http.post(path, json={**base, **fields})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert "x" * 100 not in error["message"]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"model": "tiny", "prompt": "\xff"}', "invalid_json"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "invalid_json"),
        (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', "invalid_json"),
        (b"[" * 10_000, "invalid_json"),
        (b'["a"]', "invalid_json"),
        (b"{}", "missing_required_parameter"),
    ],
)
async def test_a_body_that_is_not_a_json_object_in_utf8_is_refused(
    http: httpx.AsyncClient, content: bytes, code: str
) -> None:
    answer = await http.post(TEXT, content=content)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == code


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("PUT", "/v1/models", 405), ("GET", CHAT, 405), ("GET", f"{CHAT}/chatcmpl-none", 404)],
)
async def test_wrong_paths_and_methods_answer_in_the_same_error_format(
    http: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    answer = await http.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_an_oversize_body_is_refused_however_it_is_framed(http: httpx.AsyncClient) -> None:
    content = json.dumps({"model": "tiny", "prompt": "x" * 30_000}).encode()

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(content), 1000):
            yield content[start : start + 1000]

    for body in (content, chunks()):
        answer = await http.post(TEXT, content=body)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"
    # The connection, or a new one, serves on.
    assert (await http.post(TEXT, json={"model": "tiny", "prompt": "x"})).status_code == 200


async def test_an_endless_body_is_refused_without_waiting_for_its_end(gateway: GatewayProcess, worker: Worker) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(5):
        writer.write(b"1388\r\n" + b"x" * 5000 + b"\r\n")
    async with asyncio.timeout(PATIENCE_S):
        head = await reader.readuntil(b"\r\n\r\n")
    assert b" 413 " in head.split(b"\r\n")[0]
    writer.close()


async def test_a_body_that_never_arrives_is_given_up(gateway: GatewayProcess, worker: Worker) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    async with asyncio.timeout(PATIENCE_S):
        head = await reader.readuntil(b"\r\n\r\n")
    assert b" 408 " in head.split(b"\r\n")[0]
    writer.close()


async def test_headers_that_make_no_sense_are_refused_by_name(http: httpx.AsyncClient) -> None:
    for name, value in (
        ("x-headrace-timeout-s", "soon"),
        ("x-headrace-queue-timeout-s", "-1"),
        ("idempotency-key", "k" * 300),
        ("content-encoding", "gzip"),
    ):
        answer = await http.post(CHAT, json=chat_body(1), headers={name: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == name


async def test_no_prompt_text_reaches_the_log(http: httpx.AsyncClient, gateway: GatewayProcess) -> None:
    secret = "zebra-in-the-rain"
    messages = [{"role": "user", "content": secret}]
    assert (await http.post(CHAT, json=chat_body(fresh_seed(), messages=messages))).status_code == 200
    assert (await http.post(CHAT, json=chat_body(1, messages=messages, stop=secret * 9))).status_code == 200
    assert (await http.post(CHAT, json=chat_body(1, messages=messages, top_p=secret))).status_code == 400
    assert secret not in gateway.log_path.read_text()
