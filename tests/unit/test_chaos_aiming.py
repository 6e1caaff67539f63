"""A fault strikes only what holds work in the state that it names; a fault that hits nothing proves nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from nats.aio.client import Client

from loadgen.chaos.aiming import Aimer, Sight
from loadgen.chaos.http_client import HttpClients
from loadgen.chaos.nats_client import NatsClients
from loadgen.chaos.observer import Heard, Observer, Seen
from loadgen.chaos.reading import Reading, Shown
from loadgen.chaos.schedule import FAULTS
from loadgen.chaos.wave import Wave
from loadgen.chaos.workload import wave_of_requests
from shared.protocol.records import Accepted, Claimed, Ended, Tokens, Usage
from shared.protocol.status import InstanceStatus

BY_NAME = {fault.name: fault for fault in FAULTS}


class Sky:
    """A wave of which nothing has landed, and an observer that is told what to have seen. Nothing is connected."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.observer = Observer("nats://nowhere")
        clients = HttpClients(http, ["a", "b"], "m", "")
        self.wave = Wave(wave_of_requests(1, 0), "x", clients, NatsClients(Client(), "m", "t", ""), self.observer)
        self.aimer = Aimer(self.observer, self.wave, ["a", "b"])
        for flight in self.wave.flights:
            flight.task = asyncio.create_task(asyncio.sleep(60))

    def hear(self, instance: str, **fields: Any) -> None:
        stage = instance.partition("-")[0]
        status = InstanceStatus(
            stage=stage,  # type: ignore[arg-type]
            instance=instance,
            worker=f"{instance}.run",
            pid=1,
            host="h",
            started_unix_s=0,
            sent_unix_s=0,
            state="ready",
            **fields,
        )
        self.observer.heard[instance] = Heard(status, time.monotonic())

    def claim(self, number: int, instance: str, *, prompt_tokens: int = 500, tokens: int = 0) -> Seen:
        stage: Any = instance.partition("-")[0]
        seed = int(self.wave.flights[number].request.body["seed"])
        seen = self.observer.seen.setdefault(f"r{number}", Seen())
        now = time.monotonic()
        if seen.accepted is None:
            seen.apply(Accepted(f"r{number}", "t", "m", "chat", 1.0, 9.0, prompt_tokens, seed), now)
        seen.apply(Claimed(len(seen.claims) + 1, stage, f"{instance}.run", 1.0), now)
        if tokens:
            seen.apply(Tokens(len(seen.claims), seen.tokens, [1] * tokens, ""), now)
        return seen

    async def look(self, name: str, prefer: int = 0, chase: tuple[int, ...] = ()) -> Sight | None:
        """What it would strike now; None when it goes on waiting."""
        try:
            async with asyncio.timeout(0.15):
                return await self.aimer.wait(BY_NAME[name], prefer, [self.wave.flights[n] for n in chase])
        except TimeoutError:
            return None

    def land(self, *numbers: int) -> None:
        for number in numbers:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            done.set_result(None)
            self.wave.flights[number].task = done  # type: ignore[assignment]


@asynccontextmanager
async def sky() -> AsyncIterator[Sky]:
    async with httpx.AsyncClient() as http:
        found = Sky(http)
        tasks = [flight.task for flight in found.wave.flights if flight.task]
        yield found
        for task in tasks:
            task.cancel()


def hits(sight: Sight | None, over: Sky) -> list[int]:
    assert sight is not None
    return sorted(over.wave.flights.index(flight) for flight in sight.hits)


async def test_a_decode_worker_is_struck_when_it_streams_enough_requests() -> None:
    async with sky() as over:
        over.hear("decode-0")
        over.hear("decode-1")
        over.claim(0, "decode-1", tokens=5)
        over.claim(1, "decode-1", tokens=5)
        assert await over.look("kill decode") is None
        over.claim(2, "decode-1", tokens=1)
        sight = await over.look("kill decode")
        assert hits(sight, over) == [0, 1, 2]
        assert sight is not None
        assert sight.instance is not None
        assert sight.instance.instance == "decode-1"


async def test_with_most_of_the_wave_landed_it_strikes_what_is_left() -> None:
    async with sky() as over:
        over.hear("decode-0")
        over.claim(0, "decode-0", tokens=5)
        assert await over.look("kill decode") is None
        over.land(5, 6, 7)
        assert hits(await over.look("kill decode"), over) == [0]


@pytest.mark.parametrize("tokens", [0, 2, 45, 48])
async def test_a_stream_that_has_hardly_begun_or_is_almost_over_is_no_target(tokens: int) -> None:
    async with sky() as over:
        over.hear("decode-0")
        for number in range(4):
            over.claim(number, "decode-0", tokens=tokens)
        assert await over.look("kill decode") is None


async def test_what_has_ended_landed_or_belongs_to_others_is_no_target() -> None:
    async with sky() as over:
        over.hear("decode-0")
        over.land(5, 6, 7)
        over.claim(5, "decode-0", tokens=5)
        over.claim(1, "decode-0", tokens=5).apply(Ended(1, "length", Usage(1, 1)), 0.0)
        over.claim(2, "decode-9", tokens=5)
        assert await over.look("kill decode") is None


async def test_prefill_is_struck_before_in_and_after_its_push() -> None:
    async with sky() as over:
        over.hear("prefill-0")
        over.hear("kvstore-0", blocks_used=30, blocks_evictable=30)
        over.claim(0, "prefill-0", prompt_tokens=40)
        assert await over.look("kill prefill before its push") is None
        over.claim(1, "prefill-0")
        assert hits(await over.look("kill prefill before its push"), over) == [0, 1]
        over.aimer._struck.clear()
        assert await over.look("kill prefill in its push") is None
        over.hear("kvstore-0", blocks_used=33, blocks_evictable=30)
        assert hits(await over.look("kill prefill in its push"), over) == [0, 1]
        over.aimer._struck.clear()
        assert await over.look("kill prefill after its push") is None
        over.observer.seen["r1"].apply(Tokens(1, 0, [3], ""), time.monotonic())
        assert hits(await over.look("kill prefill after its push"), over) == [0, 1]


async def test_prefill_is_struck_as_soon_as_it_works_on_anything() -> None:
    """It never works on many requests at once, and a further wave finds their blocks stored."""
    async with sky() as over:
        over.hear("prefill-0")
        assert await over.look("restart prefill") is None
        over.claim(0, "prefill-0", prompt_tokens=40)
        assert hits(await over.look("restart prefill"), over) == [0]


async def test_a_claim_that_is_old_is_no_longer_before_its_push() -> None:
    async with sky() as over:
        over.hear("prefill-0")
        over.claim(1, "prefill-0").claimed_s -= 5.0
        assert await over.look("kill prefill before its push") is None


async def test_the_second_of_two_kills_follows_the_request_to_its_successor() -> None:
    async with sky() as over:
        over.hear("decode-0")
        over.hear("decode-1")
        for number in (1, 2, 3):
            over.claim(number, "decode-0", tokens=5)
        assert await over.look("kill decode", 0, chase=(0,)) is None
        over.claim(0, "decode-1", tokens=5)
        assert hits(await over.look("kill decode", 0, chase=(0,)), over) == [0]


async def test_a_gateway_is_struck_when_clients_read_from_it() -> None:
    async with sky() as over:
        over.hear("gateway-1", url="http://b")
        over.land(5, 6, 7)
        over.claim(0, "decode-0", tokens=5)
        reading = Reading("client", "stream", "r0", gateway=1)
        over.wave.flights[0].readings.append(reading)
        assert await over.look("kill gateway") is None
        reading.shown += [Shown(1.0, 0, n, text="x") for n in range(4)]
        assert hits(await over.look("kill gateway"), over) == [0]
        reading.gateway = -1
        assert await over.look("kill gateway") is None


async def test_a_store_is_struck_while_it_has_leases() -> None:
    async with sky() as over:
        over.hear("kvstore-0")
        for number in range(3):
            over.claim(number, "decode-0", tokens=5)
        assert await over.look("kill kvstore") is None
        over.hear("kvstore-0", leases=1)
        assert hits(await over.look("kill kvstore"), over) == [0, 1, 2]


async def test_no_sight_comes_once_all_have_landed() -> None:
    async with sky() as over:
        over.land(*range(8))
        assert await over.aimer.wait(BY_NAME["kill decode"], 0) is None


async def test_a_worker_that_was_struck_is_not_struck_again_while_it_is_still_heard() -> None:
    async with sky() as over:
        over.hear("decode-0")
        for number in range(3):
            over.claim(number, "decode-0", tokens=5)
        assert hits(await over.look("kill decode"), over) == [0, 1, 2]
        assert await over.look("kill decode", 0, chase=(0, 1, 2)) is None
        over.hear("decode-1")
        over.claim(1, "decode-1", tokens=5)
        sight = await over.look("kill decode", 0, chase=(0, 1, 2))
        assert hits(sight, over) == [1]


async def test_a_request_that_ran_twice_in_its_wave_is_known() -> None:
    async with sky() as over:
        over.wave._started_unix_s = 1.0
        flight = over.wave.flights[0]
        over.claim(0, "decode-0")
        assert list(over.wave.runs_of(flight)) == ["r0"]
        accepted = over.observer.seen["r0"].accepted
        assert accepted is not None
        again, before = Seen(), Seen()
        again.apply(msgspec.structs.replace(accepted, request_id="r0b", created_unix_s=2.0), 0.0)
        before.apply(msgspec.structs.replace(accepted, request_id="r0a", created_unix_s=0.5), 0.0)
        over.observer.seen |= {"r0b": again, "r0a": before}
        assert list(over.wave.runs_of(flight)) == ["r0", "r0b"]
