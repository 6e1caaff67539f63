"""The requests in flight: sends one wave, knows which log belongs to which request, and who is connected where."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from loadgen.chaos.http_client import HttpClients
from loadgen.chaos.nats_client import NatsClients
from loadgen.chaos.observer import Observer, Seen
from loadgen.chaos.reading import Reading
from loadgen.chaos.workload import Client, Request

STAGGER_S: Final = 0.12


@dataclass(eq=False)
class Flight:
    """One request on its way: its readers, the one that sent it first."""

    request: Request
    label: str
    readings: list[Reading] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    @property
    def flying(self) -> bool:
        return self.task is not None and not self.task.done()

    @property
    def request_id(self) -> str:
        return next((reading.request_id for reading in self.readings if reading.request_id), "")


class Wave:
    """Sends a wave's requests one after the other, all of them in flight at once, and keeps their readings."""

    def __init__(
        self, requests: Sequence[Request], label: str, http: HttpClients, over_nats: NatsClients, observer: Observer
    ) -> None:
        self.flights = [Flight(request, f"{label}-{request.number}") for request in requests]
        self._by_seed = {int(flight.request.body["seed"]): flight for flight in self.flights}
        self._http = http
        self._nats = over_nats
        self._observer = observer
        self._started_unix_s = 0.0

    @property
    def flying(self) -> bool:
        return any(flight.flying for flight in self.flights)

    def start(self) -> None:
        """All count as flying from now on; each waits for its turn to be sent."""
        self._started_unix_s = time.time()
        for place, flight in enumerate(self.flights):
            flight.task = asyncio.create_task(self._fly(flight, place * STAGGER_S))

    async def land(self) -> None:
        """Return when every reader of every request is done or gave up."""
        await asyncio.gather(*(flight.task for flight in self.flights if flight.task is not None))

    async def _fly(self, flight: Flight, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        request, first = flight.request, Reading("client", flight.request.client)
        flight.readings.append(first)
        async with asyncio.TaskGroup() as group:
            sender = group.create_task(self._read(request.client, request, first, flight.label))
            accepted = group.create_task(first.known.wait())
            await asyncio.wait({sender, accepted}, return_when=asyncio.FIRST_COMPLETED)
            accepted.cancel()
            for number, client in zip(itertools.count(1), request.readers, strict=False):
                reading = Reading(f"reader {number}", client, first.request_id)
                flight.readings.append(reading)
                group.create_task(self._read(client, request, reading, flight.label))

    async def _read(self, client: Client, request: Request, reading: Reading, label: str) -> None:
        match client:
            case "stream":
                await self._http.stream(request, reading, label)
            case "whole":
                await self._http.whole(request, reading, label)
            case "nats":
                await self._nats.run(request, reading, label)

    def logs(self) -> dict[str, tuple[Flight, Seen]]:
        """The logs of requests in flight, by the id of the choice, as the observer saw them. Later runs win."""
        found = {}
        seeds: dict[str, Flight] = {}
        for request_id, seen in self._observer.seen.items():
            accepted = seen.accepted
            if accepted is None:
                continue
            if accepted.choice == 0 and (flight := self._by_seed.get(accepted.seed)) is not None:
                seeds[request_id] = flight
            base = request_id.removesuffix(f"-c{accepted.choice}") if accepted.choice else request_id
            if (flight := seeds.get(base)) is not None and flight.flying:
                found[request_id] = (flight, seen)
        return found

    def runs_of(self, flight: Flight) -> dict[str, Seen]:
        """Every log that this flight's request began in this wave, by the id of its first choice."""
        return {
            request_id: seen
            for request_id, seen in self._observer.seen.items()
            if (accepted := seen.accepted) is not None
            and accepted.choice == 0
            and accepted.created_unix_s >= self._started_unix_s
            and self._by_seed.get(accepted.seed) is flight
        }

    def streams_at(self, gateway: int | None = None) -> list[tuple[Flight, Reading]]:
        """HTTP readers that are connected, to one gateway or to any."""
        return [
            (flight, reading)
            for flight in self.flights
            for reading in flight.readings
            if reading.gateway >= 0 and gateway in (None, reading.gateway)
        ]
