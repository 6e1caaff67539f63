"""Finds the moment and the process: who holds work in the state that a fault wants to hit. Touches nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

from loadgen.chaos.observer import Observer, Seen
from loadgen.chaos.reading import Reading
from loadgen.chaos.schedule import Aim, Fault
from loadgen.chaos.wave import Flight, Wave
from loadgen.chaos.workload import OUTPUT_TOKENS
from shared.protocol.status import InstanceStatus
from shared.protocol.subjects import Stage

LONG_PROMPT_TOKENS: Final = 350
CLAIM_FRESH_S: Final = 0.5
TOKENS_BEFORE: Final = 3
TOKENS_LEFT: Final = 8
PUSHED_BLOCKS: Final = 2
ENOUGH: Final = 3
"""A fault that may strike a stretch of time waits until it hits this many requests."""
ALMOST_OVER: Final = 3
"""But not longer than until this many of the wave have landed."""
_PING_S: Final = 0.1


@dataclass(frozen=True)
class Sight:
    """What to strike now. `instance` is None for servers, clients and the KV plane. `hits` are the flights it hits."""

    instance: InstanceStatus | None
    hits: list[Flight]


class Aimer:
    """Aims at one wave."""

    def __init__(self, observer: Observer, wave: Wave, gateways: list[str]) -> None:
        self._observer = observer
        self._wave = wave
        self._gateways = gateways
        self._leased_at_claim: dict[tuple[str, int], int] = {}
        self._struck: set[str] = set()
        """Workers that were aimed at before: the dead are heard of for a while."""

    async def wait(self, fault: Fault, prefer: int, chase: Collection[Flight] = ()) -> Sight | None:
        """The first good moment; None when the wave has landed without one.

        `chase`: flights that the last fault hit, one of which this one must hit again.
        """
        pinged_s = 0.0
        while self._wave.flying:
            self._note_claims()
            for sight in (self._look(fault, prefer), self._look(fault, 1 - prefer)):
                if sight is None or (chase and not any(flight in chase for flight in sight.hits)):
                    continue
                if chase or len(sight.hits) >= ENOUGH or self._cannot_wait(fault):
                    if sight.instance is not None:
                        self._struck.add(sight.instance.worker)
                    return sight
            if time.monotonic() - pinged_s > _PING_S:
                pinged_s = time.monotonic()
                await self._observer.ping()
            await self._observer.change(0.05)
        return None

    def _cannot_wait(self, fault: Fault) -> bool:
        """The state that it aims at is a moment, or what the wave sends has passed its peak.

        Prefill works on a few requests at once and on each for a moment; a further wave finds their blocks stored.
        """
        landed = sum(not flight.flying for flight in self._wave.flights)
        brief = fault.target == "prefill" or fault.aim in ("claimed", "pushing", "pushed")
        return brief or landed >= ALMOST_OVER

    def _look(self, fault: Fault, prefer: int) -> Sight | None:
        match fault.target:
            case "prefill" | "decode":
                sight = self._look_at_workers(fault, prefer)
            case "gateway":
                sight = self._look_at_gateways(prefer)
            case "client":
                sight = _at_large(_flights(flight for flight, _ in self._streaming_readers(None)))
            case "kvstore":
                sight = self._look_at_stores(fault, prefer)
            case "draft":
                sight = self._look_at_drafters()
            case "kv":
                sight = _at_large(_flights(flight for flight, _ in self._in(self._predicate(fault.aim))))
            case "nats" | "valkey":
                ready = self._in(self._predicate(fault.aim))
                sight = _at_large(self._all_claimed()) if ready else None
        return sight

    def _look_at_workers(self, fault: Fault, prefer: int) -> Sight | None:
        workers = self._unstruck("prefill" if fault.target == "prefill" else "decode")
        fits = self._predicate(fault.aim)
        for status in sorted(workers, key=lambda status: status.instance != f"{status.stage}-{prefer}"):
            held = [(f, seen) for f, seen in self._wave.logs().values() if seen.holder == status.worker]
            if any(seen.stage == status.stage and fits(seen) for _, seen in held):
                return Sight(status, _flights(f for f, _ in held))
        return None

    def _look_at_gateways(self, prefer: int) -> Sight | None:
        numbers = sorted(range(len(self._gateways)), key=lambda number: number != prefer)
        for number in numbers:
            found = [s for s in self._unstruck("gateway") if s.instance == f"gateway-{number}"]
            if found and self._streaming_readers(number):
                return Sight(found[0], _flights(f for f, _ in self._wave.streams_at(number)))
        return None

    def _look_at_stores(self, fault: Fault, prefer: int) -> Sight | None:
        stores = [s for s in self._unstruck("kvstore") if s.leases > 0]
        stores.sort(key=lambda status: status.instance != f"kvstore-{prefer}")
        return Sight(stores[0], self._all_claimed()) if stores and self._in(self._predicate(fault.aim)) else None

    def _look_at_drafters(self) -> Sight | None:
        hits = _flights(flight for flight, _ in self._in(_streaming) if flight.request.speculates)
        drafters = self._unstruck("draft")
        return Sight(drafters[0], hits) if hits and drafters else None

    def _unstruck(self, stage: Stage) -> list[InstanceStatus]:
        return [status for status in self._observer.statuses(stage) if status.worker not in self._struck]

    def _predicate(self, aim: Aim) -> Callable[[Seen], bool]:
        now = time.monotonic()
        match aim:
            case "working":
                return lambda seen: bool(seen.holder)
            case "claimed":
                return lambda seen: _prefilling_long(seen) and now - seen.claimed_s < CLAIM_FRESH_S
            case "pushing":
                leased = self._leased_blocks()
                return lambda seen: (
                    _prefilling_long(seen) and leased - self._leased_at_claim.get(_claim(seen), leased) >= PUSHED_BLOCKS
                )
            case "pushed":
                return lambda seen: seen.stage == "prefill" and seen.tokens > 0
            case "streaming":
                return _streaming

    def _note_claims(self) -> None:
        """How many blocks were leased when a long prompt was claimed: more than that is its push."""
        for _, seen in self._wave.logs().values():
            if _prefilling_long(seen):
                self._leased_at_claim.setdefault(_claim(seen), self._leased_blocks())

    def _leased_blocks(self) -> int:
        return sum(status.blocks_used - status.blocks_evictable for status in self._observer.statuses("kvstore"))

    def _in(self, fits: Callable[[Seen], bool]) -> list[tuple[Flight, Seen]]:
        return [(flight, seen) for flight, seen in self._wave.logs().values() if fits(seen)]

    def _all_claimed(self) -> list[Flight]:
        return _flights(flight for flight, seen in self._wave.logs().values() if seen.holder)

    def _streaming_readers(self, gateway: int | None) -> list[tuple[Flight, Reading]]:
        """Streams of HTTP that have begun and whose request goes on for a while."""
        going_on = {id(flight) for flight, seen in self._in(_streaming)}
        return [
            (flight, reading)
            for flight, reading in self._wave.streams_at(gateway)
            if reading.kind == "stream" and len(reading.shown) >= TOKENS_BEFORE and id(flight) in going_on
        ]


def _streaming(seen: Seen) -> bool:
    return (
        seen.stage == "decode" and seen.tokens_of_claim >= TOKENS_BEFORE and OUTPUT_TOKENS - seen.tokens >= TOKENS_LEFT
    )


def _prefilling_long(seen: Seen) -> bool:
    long = seen.accepted is not None and seen.accepted.prompt_tokens >= LONG_PROMPT_TOKENS
    return long and seen.stage == "prefill" and seen.tokens == 0


def _claim(seen: Seen) -> tuple[str, int]:
    return (seen.accepted.request_id if seen.accepted else "", len(seen.claims))


def _at_large(hits: list[Flight]) -> Sight | None:
    """For what is no instance."""
    return Sight(None, hits) if hits else None


def _flights(found: Iterable[Flight]) -> list[Flight]:
    """Each once: a request may have several choices or readers."""
    return list(dict.fromkeys(found))
