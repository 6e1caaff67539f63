"""Which faults strike in which order: the same for the same seed. Pure; how a fault is made is not decided here."""

from __future__ import annotations

import random
from collections.abc import Collection, Container
from typing import Final, Literal

import msgspec

from loadgen.chaos.errors import NoSuchFault

Act = Literal["kill", "stop", "away", "drain", "restart", "cut", "stall"]
Target = Literal["gateway", "prefill", "decode", "draft", "kvstore", "nats", "valkey", "client", "kv"]
Aim = Literal["working", "claimed", "pushing", "pushed", "streaming"]
Needs = Literal["nothing", "proxies"]

STOP_S: Final = 20.0
AWAY_S: Final = 10.0
STALL_S: Final = 8.0


class Fault(msgspec.Struct, frozen=True):
    """One thing that goes wrong. It strikes when its target has work in the state that `aim` names.

    `kill` is SIGKILL, `stop` SIGSTOP for `lasts_s` and then SIGCONT, `away` SIGKILL of a server that comes back after
    `lasts_s`, `drain` SIGTERM, `restart` the operator's command. `cut` resets connections, `stall` lets nothing pass
    for `lasts_s`: of the target's NATS connection, of the client's (`client`), or between workers and stores (`kv`).
    """

    name: str
    act: Act
    target: Target
    aim: Aim = "working"
    lasts_s: float = 0.0

    @property
    def needs(self) -> Needs:
        ours = self.act in ("away", "stall") or (self.act == "cut" and self.target != "client")
        return "proxies" if ours else "nothing"


FAULTS: Final[tuple[Fault, ...]] = (
    Fault("kill decode", "kill", "decode", "streaming"),
    Fault("kill prefill before its push", "kill", "prefill", "claimed"),
    Fault("kill prefill in its push", "kill", "prefill", "pushing"),
    Fault("kill prefill after its push", "kill", "prefill", "pushed"),
    Fault("kill draft", "kill", "draft", "streaming"),
    Fault("kill kvstore", "kill", "kvstore", "streaming"),
    Fault("kill gateway", "kill", "gateway", "streaming"),
    Fault("kill nats", "kill", "nats", "streaming"),
    Fault("kill valkey", "kill", "valkey", "working"),
    Fault("nats away", "away", "nats", "streaming", AWAY_S),
    Fault("valkey away", "away", "valkey", "working", AWAY_S),
    Fault("stop decode", "stop", "decode", "streaming", STOP_S),
    Fault("stop prefill", "stop", "prefill", "pushing", STOP_S),
    Fault("stop kvstore", "stop", "kvstore", "pushing", STOP_S),
    Fault("drain decode", "drain", "decode", "streaming"),
    Fault("drain prefill", "drain", "prefill", "claimed"),
    Fault("drain gateway", "drain", "gateway", "streaming"),
    Fault("drain kvstore", "drain", "kvstore", "streaming"),
    Fault("restart decode", "restart", "decode", "streaming"),
    Fault("restart prefill", "restart", "prefill", "working"),
    Fault("restart gateway", "restart", "gateway", "streaming"),
    Fault("cut NATS of decode", "cut", "decode", "streaming"),
    Fault("cut NATS of prefill", "cut", "prefill", "claimed"),
    Fault("cut NATS of gateway", "cut", "gateway", "streaming"),
    Fault("stall NATS of decode", "stall", "decode", "streaming", STALL_S),
    Fault("cut KV transfer", "cut", "kv", "pushing"),
    Fault("cut client", "cut", "client", "streaming"),
)

NO_FAULT: Final = Fault("no fault", "cut", "client")
"""What the report calls an episode without one."""

PAIRS: Final[tuple[tuple[str, str], ...]] = (
    ("kill decode", "kill decode"),
    ("kill kvstore", "kill decode"),
    ("kill nats", "kill decode"),
    ("kill gateway", "kill prefill in its push"),
)
"""Faults that strike one wave, the second on what the first left running."""


class Episode(msgspec.Struct, frozen=True):
    """One wave of requests and the faults that strike it, one after the other. `prefer`: the instance to aim at.

    One episode of each pass has no fault: its gaps are what the load alone costs.
    """

    wave: int
    faults: tuple[Fault, ...]
    prefer: int


def schedule(
    seed: int, first_wave: int, waves: int, available: Container[Needs], only: Collection[str] = ()
) -> list[Episode]:
    """`waves` episodes: every fault that can be made here once before any comes again, in an order drawn anew.

    `only` names the faults to choose from. Raises NoSuchFault when none is left.
    """
    rng = random.Random(f"{seed}:schedule:{first_wave}")
    by_name = {fault.name: fault for fault in FAULTS}
    singles = [(fault,) for fault in FAULTS]
    every: list[tuple[Fault, ...]] = [*singles, *(tuple(by_name[name] for name in pair) for pair in PAIRS)]
    possible = [
        faults
        for faults in every
        if all(fault.needs in available and (not only or fault.name in only) for fault in faults)
    ]
    if not possible or not set(only) <= by_name.keys():
        raise NoSuchFault(f"no fault to make here among {', '.join(only) or 'all'}; there are {', '.join(by_name)}")
    if not only:
        possible.append(())
    order: list[tuple[Fault, ...]] = []
    while len(order) < waves:
        order += rng.sample(possible, len(possible))
    return [Episode(first_wave + n, faults, rng.randrange(2)) for n, faults in enumerate(order[:waves])]


def whole_pass(available: Container[Needs]) -> int:
    """Episodes in which every fault that can be made here comes once, and one without."""
    singles = {fault.name for fault in FAULTS if fault.needs in available}
    return 1 + len(singles) + sum(set(pair) <= singles for pair in PAIRS)
