"""The examples run as they are, against a gateway; and the protocol document's way of cancelling works by hand."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from shared.protocol.subjects import SUBMIT
from tests.integration.gateway_harness import (
    PATIENCE_S,
    GatewayProcess,
    Worker,
    chat_body,
    ended_of,
    entries_of,
    fresh_seed,
    make_model,
)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def gateway(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    directory = tmp_path_factory.mktemp("gateway-examples")
    process = GatewayProcess(nats_url, make_model(directory / "tiny"), directory).start()
    yield process
    assert process.stop() == 0


@pytest_asyncio.fixture(scope="module")
async def worker(nats_url: str) -> AsyncIterator[Worker]:
    async with Worker.running(nats_url, "tiny") as running:
        yield running


async def start(name: str, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",  # isolated: what this repository holds is not importable from its folder
        str(EXAMPLES / name),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_the_nats_client_prints_the_answer_and_the_audit_sees_it(
    gateway: GatewayProcess, worker: Worker, nats_url: str
) -> None:
    async with asyncio.timeout(PATIENCE_S):
        audit = await start("nats_audit.py", "--nats", nats_url)
        assert audit.stdout is not None
        assert (await audit.stdout.readline()).startswith(b"listening")
        client = await start("nats_client.py", "hi", "--nats", nats_url, "--model", "tiny")
        out, told = await client.communicate()
        assert client.returncode == 0, told.decode()
        assert out.decode() == "".join(worker.answer)
        assert b"stop: 4 tokens" in told
        request_id = told.split()[1].rstrip(b",")
        seen = b""
        while b" end " not in seen:
            seen += await audit.stdout.readline()
        audit.terminate()
        await audit.wait()
    lines = [line for line in seen.splitlines() if request_id in line]
    assert [line.split()[3] for line in lines] == [b"accepted", b"claim", b"end"]
    assert b"tokens=4" in lines[-1]
    assert b"missed=0" in lines[-1]
    assert b"Hello" not in seen


async def test_the_nats_client_says_why_it_was_refused(gateway: GatewayProcess, nats_url: str) -> None:
    client = await start("nats_client.py", "hi", "--nats", nats_url, "--model", "other")
    _, told = await client.communicate()
    assert client.returncode == 1
    assert b"does not exist" in told


async def test_the_openai_client_runs_through(gateway: GatewayProcess, worker: Worker) -> None:
    client = await start("openai_client.py", "--base-url", f"{gateway.url}/v1")
    out, told = await client.communicate()
    assert client.returncode == 0, told.decode()
    assert out.decode().count("Hello, wörld!") == 8
    assert "13 characters" in out.decode()


async def test_a_client_cancels_by_appending_the_end_itself_as_documented(
    gateway: GatewayProcess, worker: Worker
) -> None:
    seed = fresh_seed()
    worker.reserve(seed)
    client = worker.bus.client
    reply = await client.request(SUBMIT, json.dumps(chat_body(seed)).encode(), timeout=PATIENCE_S)
    accepted = json.loads(reply.data)
    await (await worker.take(seed)).claim()
    query = json.dumps({"last_by_subj": accepted["log_subject"]}).encode()
    last = await client.request("$JS.API.DIRECT.GET.HR_LOG", query, timeout=PATIENCE_S)
    assert json.loads(last.data)["type"] == "claim"
    end = {"type": "end", "epoch": 1, "reason": "cancelled", "usage": {"prompt_tokens": 7, "completion_tokens": 0}}
    for expected, code in (("1", 10071), ((last.headers or {})["Nats-Sequence"], None)):
        answer = await client.request(
            accepted["log_subject"],
            json.dumps(end).encode(),
            timeout=PATIENCE_S,
            headers={"Nats-Expected-Last-Subject-Sequence": expected},
        )
        assert json.loads(answer.data).get("error", {}).get("err_code") == code
    assert (await ended_of(worker.bus, accepted["request_id"])).reason == "cancelled"
    assert len(await entries_of(worker.bus, accepted["request_id"])) == 3
