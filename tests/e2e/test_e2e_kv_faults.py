"""The whole stack with a KV store that damages blocks, hangs or dies: answers stay, and what was kept is given back."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
import redis

from shared.blocks import KVClient, exchange
from shared.bus import Bus, LogState
from shared.protocol.blocks import BlockRef, Place
from shared.transport.tcp import TcpTransport
from tests.e2e.conftest import MODEL, Stack

ROOT = Path(__file__).resolve().parents[2]
NAME = "kvstore-9"
PATIENCE_S = 120


class ExtraStore:
    """One more store of the stack, which lets its blocks be damaged. Placement gives it about half of all blocks."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.secret = (Path(stack.env["HEADRACE_HOME"]) / "secret").read_text()
        self.redis_url = f"redis://127.0.0.1:{stack.env['HEADRACE_REDIS_PORT']}/0"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.kvstore"],
            cwd=ROOT,
            env={
                **stack.env,
                "HEADRACE_INSTANCE": NAME,
                "HEADRACE_NATS_URL": stack.nats_url,
                "HEADRACE_REDIS_URL": self.redis_url,
                "HEADRACE_SECRET": self.secret,
                "HEADRACE_STORE_MEMORY_GIB": "0.25",
                "HEADRACE_STORE_FAULT_INJECTION": "true",
            },
            stdout=subprocess.DEVNULL,
        )

    @functools.cached_property
    def place(self) -> Place:
        """Where it can be reached, once it says so."""
        for _ in until(PATIENCE_S):
            for entry in self.stack.instances("kvstore"):
                if entry["instance"] == NAME and entry["state"] == "ready":
                    place = entry["place"]
                    return Place(place["store"], place["host"], place["port"], place["transport"])
            assert self.process.poll() is None
        raise AssertionError(f"{NAME} did not announce itself")

    def keys(self) -> list[bytes]:
        """All blocks that are here, as Redis knows them."""
        with redis.Redis.from_url(self.redis_url) as client:
            names = list(client.scan_iter("hr:kv:block:*", count=1000))
            return [bytes.fromhex(name.decode().rpartition(":")[2]) for name in names if client.hexists(name, NAME)]

    def damage_everything(self) -> list[bytes]:
        """Flip a byte of each block; their keys."""
        keys = self.keys()

        async def damage() -> None:
            connection = await TcpTransport().connect(self.place.host, self.place.port, self.secret.encode(), 5)
            for key in keys:
                assert await exchange.corrupt_block(connection, key)
            connection.close()

        asyncio.run(damage())
        return keys

    def bad(self, keys: list[bytes]) -> int:
        """How many of these blocks are here with bytes that are not theirs."""

        async def check() -> int:
            client = KVClient(lambda: [self.place], TcpTransport(), self.secret, None)
            refs: list[BlockRef] = [ref for ref in await client.find(keys) if ref is not None]
            good = await client.get(refs, [bytearray(ref.n_bytes) for ref in refs], timeout_s=10)
            client.close()
            return good.count(False)

        return asyncio.run(check())

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def until(seconds: float) -> Iterator[None]:
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        yield
        time.sleep(0.1)


@pytest.fixture
def extra(stack: Stack) -> Iterator[ExtraStore]:
    store = ExtraStore(stack)
    try:
        assert store.place.store == NAME  # it is ready, and workers see it
        yield store
    finally:
        store.end()
    for _ in until(PATIENCE_S):  # until nobody counts on it any more
        if NAME not in [entry["instance"] for entry in stack.instances("kvstore")]:
            return


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=2 * PATIENCE_S)


def log_of(stack: Stack, request_id: str) -> LogState:
    async def read() -> LogState:
        async with await Bus.connect(stack.nats_url, name="test") as bus:
            return await bus.open_log("default", request_id).state()

    return asyncio.run(read())


def asking(client: openai.OpenAI, sentences: int, output: int) -> Callable[[], str]:
    """A way to ask the same thing again; it answers with the request's id."""
    long = "The miller opens the headrace and counts the sacks of grain that came by cart this morning. " * sentences
    arguments = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"[{time.time_ns()}] Summarise: {long}"}],
        "max_tokens": output,
        "temperature": 0.7,
        "seed": 5,
        "extra_body": {"ignore_eos": True},
    }

    def ask() -> str:
        answer = client.chat.completions.create(**arguments)  # type: ignore[call-overload]
        assert answer.choices[0].finish_reason == "length"
        return str(answer.id)

    return ask


def counted(stack: Stack, metric: str) -> float:
    """Sum over the workers that run now; a restarted one counts from zero."""
    total = 0.0
    for stage in ("prefill", "decode"):
        for entry in stack.instances(stage):
            lines = httpx.get(entry["metrics_url"], timeout=5).text.splitlines()
            total += sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(metric))
    return total


def no_lease_is_left(stack: Stack) -> None:
    leases = {}
    for _ in until(PATIENCE_S):
        leases = {entry["instance"]: entry.get("leases", 0) for entry in stack.instances("kvstore")}
        if not any(leases.values()):
            return
    raise AssertionError(f"leases: {leases}")


def empty(stack: Stack, *names: str) -> None:
    """kill -9: what comes back holds no block."""

    def running() -> dict[str, str]:
        stages = stack.status()["stages"].values()
        entries = [entry for stage in stages for entry in stage["instances"] if entry["instance"] in names]
        return {entry["instance"]: entry["worker"] for entry in entries if entry["state"] == "ready"}

    before = running()
    for pid in [stack.pid_of(name) for name in names]:
        stack.kill_9(pid)
    for _ in until(PATIENCE_S):
        after = running()
        if len(after) == len(names) and not after.items() & before.items():
            return
    raise AssertionError(f"not all of {names} came back")


def test_blocks_damaged_in_a_stores_memory_change_no_token_are_counted_and_dropped(
    stack: Stack, client: openai.OpenAI, extra: ExtraStore
) -> None:
    ask = asking(client, sentences=20, output=24)
    undisturbed = log_of(stack, ask()).output_ids
    empty(stack, "prefill-0", "decode-0")
    damaged = extra.damage_everything()
    assert len(damaged) >= 3
    assert log_of(stack, ask()).output_ids == undisturbed
    met = counted(stack, "headrace_kv_blocks_checksum_failed_total")
    assert met >= 1
    assert extra.bad(damaged) <= len(damaged) - met  # a block of the answer is met by no prompt yet
    no_lease_is_left(stack)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL])
def test_a_store_that_hangs_or_dies_in_the_middle_of_a_hand_over_changes_no_token(
    stack: Stack, client: openai.OpenAI, extra: ExtraStore, fault: signal.Signals
) -> None:
    ask = asking(client, sentences=35, output=16)

    async def disturbed() -> str:
        asked = asyncio.create_task(asyncio.to_thread(ask))
        while not await asyncio.to_thread(extra.keys):
            assert not asked.done(), "no block came before the answer"
            await asyncio.sleep(0.02)
        os.kill(extra.process.pid, fault)
        return await asked

    request_id = asyncio.run(disturbed())
    os.kill(extra.process.pid, signal.SIGCONT)
    state = log_of(stack, request_id)
    assert [claim.stage for claim in state.claims] == ["prefill", "decode"]
    no_lease_is_left(stack)
    extra.end()
    empty(stack, "prefill-0", "decode-0", "kvstore-0")  # so that all is computed from the prompt alone
    assert log_of(stack, ask()).output_ids == state.output_ids
