"""The compose stack for real: images are built, every stage comes up healthy, a completion streams, decode is scaled.

Needs a Docker engine (DOCKER_HOST is honoured) and docker-compose; `make compose-test` runs it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from shared.models import resolve_model
from shared.models.cache import cache_root
from tests.conftest import free_port

ROOT = Path(__file__).parents[2]
BUILD_S = 1800
START_S = 240
CORE = ["nats", "redis", "kvstore", "prefill", "decode", "draft", "gateway"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(BUILD_S + 3 * START_S)]


@pytest.fixture(scope="module", autouse=True)
def every_stage_is_back() -> None:
    """This stack is another one than the one that the end-to-end tests share."""


class Compose:
    """docker-compose on one project of its own."""

    def __init__(self) -> None:
        self.project = f"headrace-test-{secrets.token_hex(3)}"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._env = {
            **os.environ,
            "HEADRACE_SECRET": secrets.token_hex(32),
            "HEADRACE_GATEWAY_PORTS": str(self.port),
            "HEADRACE_KV_MEMORY_GIB": "0.5",
            "HEADRACE_STORE_MEMORY_GIB": "0.25",
        }
        if (ROOT / "wheels").is_dir():  # collected by `make wheels`: build without a network
            self._env.setdefault("HEADRACE_PIP_OPTIONS", "--no-index")

    def run(self, *arguments: str, timeout_s: float = 120) -> str:
        program = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
        command = [*program, "-p", self.project, "-f", str(ROOT / "compose" / "docker-compose.yml"), *arguments]
        done = subprocess.run(command, check=False, env=self._env, capture_output=True, text=True, timeout=timeout_s)
        assert done.returncode == 0, f"{' '.join(arguments)}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout

    def containers(self, service: str) -> list[dict[str, Any]]:
        ids = self.run("ps", "-q", service).split()
        if not ids:
            return []
        inspected = subprocess.run(["docker", "inspect", *ids], check=True, capture_output=True, timeout=60).stdout
        answer: list[dict[str, Any]] = json.loads(inspected)
        return answer

    def healthy(self, service: str, count: int = 1) -> bool:
        health = [container["State"].get("Health", {}).get("Status") for container in self.containers(service)]
        return health == ["healthy"] * count

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5).is_success
        except httpx.HTTPError:
            return False

    def status(self) -> dict[str, Any]:
        """What all instances say of themselves, asked over NATS from inside the gateway's container."""
        program = (
            "import asyncio, json, os\n"
            "from shared.bus import Bus\n"
            "async def main():\n"
            "    async with await Bus.connect(os.environ['HEADRACE_NATS_URL'], name='test') as bus:\n"
            "        await asyncio.sleep(2.5)\n"
            "        print(json.dumps([[s.stage, s.instance, s.transport, s.state] for s in bus.statuses.live()]))\n"
            "asyncio.run(main())\n"
        )
        output = self.run("exec", "-T", "gateway", "python", "-c", program)
        told = json.loads(next(line for line in output.splitlines() if line.startswith("[[")))
        return {instance: {"stage": stage, "transport": t, "state": state} for stage, instance, t, state in told}


def eventually(reached: Callable[[], bool], what: str, timeout_s: float = START_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(1)


def put_model(compose: Compose) -> None:
    """Copy the converted default model into the stack's volume: containers may have no way out to fetch it."""
    entry = resolve_model("smollm2-135m-instruct").path
    compose.run("up", "--no-start", "model")
    (container,) = compose.containers("model")
    pack = ["tar", "-C", str(cache_root()), "-c", str(entry.relative_to(cache_root()))]
    with subprocess.Popen(pack, stdout=subprocess.PIPE) as tar:
        unpack = ["docker", "cp", "-", f"{container['Id']}:/models"]
        subprocess.run(unpack, check=True, stdin=tar.stdout, timeout=300)
    assert tar.returncode == 0


@pytest.fixture(scope="module")
def stack() -> Iterator[Compose]:
    compose = Compose()
    compose.run("build", timeout_s=BUILD_S)
    try:
        put_model(compose)
        compose.run("up", "-d", timeout_s=START_S)
        for service in CORE:
            eventually(lambda name=service: compose.healthy(name), f"{service} healthy")  # type: ignore[misc]
        eventually(compose.ready, "the gateway ready")
        yield compose
    except BaseException:
        sys.stderr.write(compose.run("logs", "--no-color", "--tail", "20"))
        raise
    finally:
        compose.run("down", "--volumes", "--timeout", "10", timeout_s=START_S)


def stream(compose: Compose, words: str) -> tuple[str, str | None]:
    client = openai.OpenAI(base_url=f"{compose.url}/v1", api_key="none", max_retries=0, timeout=120)
    chunks = client.chat.completions.create(
        model="smollm2-135m-instruct",
        messages=[{"role": "user", "content": words}],
        max_tokens=24,
        temperature=0,
        stream=True,
    )
    text, reason = "", None
    for chunk in chunks:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return text, reason


def test_a_completion_streams_through_the_containers_and_decode_scales(stack: Compose) -> None:
    text, reason = stream(stack, "Count from one to five.")
    assert text.strip()
    assert reason in ("stop", "length")

    stack.run("up", "-d", "--no-build", "--scale", "decode=2", timeout_s=START_S)
    eventually(lambda: stack.healthy("decode", 2), "two decode workers healthy")
    eventually(
        lambda: [s["state"] for s in stack.status().values() if s["stage"] == "decode"] == ["ready", "ready"],
        "two decode workers ready",
    )
    assert stream(stack, "Count from one to five.") == (text, reason)
    moving = {s["stage"]: s["transport"] for s in stack.status().values() if s["stage"] in ("prefill", "kvstore")}
    assert all(transport.startswith("ucx") for transport in moving.values()), moving


def test_containers_run_without_root_and_the_gateway_without_torch(stack: Compose) -> None:
    for service in ("gateway", "prefill", "decode", "draft", "kvstore", "nats"):
        (container, *_) = stack.containers(service)
        assert container["Config"]["User"] not in ("", "root", "0"), service
    check = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is not None)"
    for service in ("gateway", "kvstore"):
        stack.run("exec", "-T", service, "python", "-c", check)


def test_a_killed_container_comes_back_and_the_stack_serves_again(stack: Compose) -> None:
    crash = (
        "import os, pathlib, signal\n"
        "for process in pathlib.Path('/proc').glob('[0-9]*'):\n"
        "    if b'services.prefill' in (process / 'cmdline').read_bytes().split(b'\\0'):\n"
        "        os.kill(int(process.name), signal.SIGKILL)\n"
    )
    stack.run("exec", "-T", "prefill", "python", "-c", crash)
    eventually(lambda: stack.containers("prefill")[0]["RestartCount"] > 0, "prefill restarted")
    eventually(lambda: stack.healthy("prefill") and stack.ready(), "ready after the kill")
    assert stream(stack, "Say hello.")[1] in ("stop", "length")
