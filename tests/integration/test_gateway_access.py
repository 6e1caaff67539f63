"""Who may do what: API keys and tenants over HTTP and NATS, `hr.submit`, and how a gateway fails to start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from shared.bus import Bus
from shared.protocol.records import Tokens
from shared.protocol.subjects import SUBMIT
from tests.conftest import free_port, wait_for_port
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

CHAT = "/v1/chat/completions"
KEYS = {"sk-a==": "acme.corp", "sk-b": "beta"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gateway-access")
    make_model(path / "tiny")
    return path


@pytest.fixture(scope="module")
def gateway(nats_url: str, directory: Path) -> Iterator[GatewayProcess]:
    process = GatewayProcess(nats_url, directory / "tiny", directory, api_keys=json.dumps(KEYS)).start()
    yield process
    assert process.stop() == 0
    text = process.log_path.read_text()
    assert not any(key in text for key in KEYS)


@pytest_asyncio.fixture(scope="module")
async def worker(nats_url: str) -> AsyncIterator[Worker]:
    async with Worker.running(nats_url, "tiny") as running:
        yield running


@pytest_asyncio.fixture
async def http(gateway: GatewayProcess, worker: Worker) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=PATIENCE_S) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "headers", [{}, bearer("sk-wrong"), {"authorization": "Bearer"}, {"authorization": "Basic sk-b"}]
)
async def test_without_a_known_key_nothing_is_served(http: httpx.AsyncClient, headers: dict[str, str]) -> None:
    for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", f"{CHAT}/x"), ("POST", f"{CHAT}/x/cancel")):
        answer = await http.request(method, path, headers=headers, json=chat_body(1))
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
    for path in ("/healthz", "/metrics"):
        assert (await http.get(path)).status_code == 200


async def test_a_tenant_does_not_see_another_tenants_requests(http: httpx.AsyncClient, worker: Worker) -> None:
    answer = await http.post(CHAT, json=chat_body(fresh_seed()), headers=bearer("sk-a=="))
    request_id = answer.json()["id"]
    assert next(r for r in worker.seen if r.request_id == request_id).tenant == "acme.corp"
    assert (await http.get(f"{CHAT}/{request_id}", headers=bearer("sk-a=="))).status_code == 200
    for method, suffix in (("GET", ""), ("GET", "?stream=true"), ("POST", "/cancel"), ("DELETE", "")):
        answer = await http.request(method, f"{CHAT}/{request_id}{suffix}", headers=bearer("sk-b"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_tenants_may_use_the_same_idempotency_key(http: httpx.AsyncClient) -> None:
    key = {"idempotency-key": f"same-{fresh_seed()}"}
    answers = [await http.post(CHAT, json=chat_body(n), headers=bearer(k) | key) for n, k in enumerate(KEYS)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json()["id"] != answers[1].json()["id"]


# NATS


async def submit(bus: Bus, body: Any, headers: dict[str, str] | None = None) -> dict[str, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = await bus.client.request(SUBMIT, data, timeout=PATIENCE_S, headers=headers)
    answer: dict[str, Any] = json.loads(reply.data)
    return answer


async def test_a_nats_client_submits_and_follows_its_request(
    gateway: GatewayProcess, worker: Worker, http: httpx.AsyncClient
) -> None:
    seed = fresh_seed()
    answer = await submit(worker.bus, chat_body(seed), {"Authorization": "Bearer sk-b"})
    assert (answer["tenant"], answer["seed"], answer["api"], answer["joined"]) == ("beta", seed, "chat", False)
    assert answer["live_subject"] == f"hr.live.beta.{answer['request_id']}"
    assert (await ended_of(worker.bus, answer["request_id"], "beta")).reason == "stop"
    entries = await entries_of(worker.bus, answer["request_id"], "beta")
    assert entries[0].seq == answer["log_seq"]
    assert "".join(e.record.text for e in entries if isinstance(e.record, Tokens)) == "".join(worker.answer)
    # The same request over HTTP.
    found = await http.get(f"{CHAT}/{answer['request_id']}", headers=bearer("sk-b"))
    assert found.json()["status"] == "completed"


async def test_a_nats_client_can_complete_text_and_use_an_idempotency_key(
    gateway: GatewayProcess, worker: Worker
) -> None:
    headers = {"authorization": "Bearer sk-b", "idempotency-key": f"nats-{fresh_seed()}"}
    body = {"model": "tiny", "prompt": "abc"}
    answers = [await submit(worker.bus, body, headers) for _ in range(2)]
    assert [answer["joined"] for answer in answers] == [False, True]
    assert len({(answer["request_id"], answer["seed"], answer["api"]) for answer in answers}) == 1


@pytest.mark.parametrize(
    ("body", "key", "status", "param"),
    [
        (b"\xff", "sk-b", 400, None),
        ({"model": "tiny"}, "sk-b", 400, "prompt"),
        ({"model": "tiny", "messages": []}, "sk-b", 400, "messages"),
        ({"model": "other", "prompt": "x"}, "sk-b", 404, "model"),
        ({"model": "tiny", "prompt": "x"}, "sk-x", 401, None),
    ],
)
async def test_a_bad_submission_is_answered_with_the_same_error(
    gateway: GatewayProcess, worker: Worker, body: Any, key: str, status: int, param: str | None
) -> None:
    error = (await submit(worker.bus, body, {"Authorization": f"Bearer {key}"}))["error"]
    assert (error["status"], error["param"]) == (status, param)


async def test_each_models_gateway_answers_its_submissions_and_ends_them_at_their_deadline(
    gateway: GatewayProcess, nats_url: str, directory: Path
) -> None:
    make_model(directory / "lonely")
    process = GatewayProcess(nats_url, directory / "lonely", directory).start()
    try:
        async with await Bus.connect(nats_url, name="test") as bus:
            answer = await submit(bus, {"model": "lonely", "prompt": "x"}, {"x-headrace-queue-timeout-s": "0.5"})
            ended = await ended_of(bus, answer["request_id"], answer["tenant"])
    finally:
        assert process.stop() == 0
    assert ended.error is not None
    assert ended.error.code == "queue_timeout"


# Starting


def run_to_end(**settings: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **{f"HEADRACE_{name.upper()}": value for name, value in settings.items()}}
    return subprocess.run(
        [sys.executable, "-m", "services.gateway"], env=env, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_port_in_use_is_one_clear_line(gateway: GatewayProcess, nats_url: str, directory: Path) -> None:
    port = gateway.url.rpartition(":")[2]
    ended = run_to_end(port=port, nats_url=nats_url, model=str(directory / "tiny"))
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert f"127.0.0.1:{port}" in ended.stderr
    assert "HEADRACE_PORT" in ended.stderr


def test_without_nats_the_gateway_says_what_to_start(directory: Path) -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    ended = run_to_end(port="0", nats_url=url, nats_wait_s="0.5", model=str(directory / "tiny"))
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert url in ended.stderr


def test_an_unknown_model_and_bad_settings_are_one_line_each_and_show_no_key(directory: Path) -> None:
    ended = run_to_end(port="0", model=str(directory / "nothing"))
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    ended = run_to_end(port="0", api_keys="sk-very-secret")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "HEADRACE_API_KEYS" in ended.stderr
    assert "sk-very-secret" not in ended.stderr + ended.stdout


def test_what_nats_would_not_carry_is_refused_with_413(tmp_path: Path) -> None:
    port = free_port()
    config = tmp_path / "nats.conf"
    config.write_text(
        f'listen: "127.0.0.1:{port}"\nmax_payload: 20KB\njetstream {{ store_dir: "{tmp_path / "js"}" }}\n'
    )
    nats = subprocess.Popen(
        [Path(sys.executable).parent / "nats-server", "-c", config],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for_port(port, nats)
        process = GatewayProcess(f"nats://127.0.0.1:{port}", make_model(tmp_path / "tiny", 4096), tmp_path).start()
        body = {"model": "tiny", "prompt": "x" * 3000}
        answer = httpx.post(f"{process.url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 413
        assert "max_payload" in answer.json()["error"]["message"]
        assert process.stop() == 0
    finally:
        nats.terminate()
        nats.wait()
