"""What happens in one run, drawn from its seed: the requests, the processes, the faults."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Literal

from tests.simulation.engine import Poison, output_of

FaultKind = Literal[
    "kill",
    "stop",
    "stop_drain",
    "drain",
    "hang",
    "step_fails",
    "cut",
    "hold",
    "nats",
    "outage",
    "storm",
    "consumer_deleted",
    "kill_before",
]

THEMES: dict[str, tuple[int, tuple[FaultKind, ...]]] = {
    "calm": (1, ()),
    "kills": (4, ("kill", "kill", "kill_before")),
    "pauses": (5, ("stop",)),
    "drains": (4, ("drain", "drain", "stop_drain", "stop_drain", "kill")),
    "network": (4, ("storm", "storm", "cut", "hold")),
    "nats": (3, ("nats", "nats", "kill", "consumer_deleted")),
    "outage": (2, ("nats", "outage", "outage")),
    "engine": (1, ("hang", "step_fails", "stop")),
    "mixed": (
        6,
        ("kill", "kill_before", "stop", "stop_drain", "drain", "cut", "hold", "nats", "storm", "hang", "step_fails"),
    ),
    "poison": (4, ()),
}
"""What goes wrong in a run: how often the theme is drawn, and the kinds of fault it is made of."""

TENANT = "t"
PATIENCE_S = 60.0
OUTLASTED_S = 1.0
"""How long holders wait for NATS to take an append; the second in runs in which it is away for longer than that."""

BUFFER_BYTES = 8 << 20
"""What a client keeps to send once it is connected again. 0 in some of those runs, as if it were full."""

OUTAGE_S = 9.0
"""Long enough that claims and hand-backs are given up. It comes early, when there are no tokens yet."""

LONG_S = 45.0
"""A time-out that is not meant to pass."""


@dataclass(frozen=True)
class Asked:
    """One request of a client, which repeats it under its idempotency key where it has to or `twice` anyhow."""

    key: str
    at: float
    prompt: int
    seed: int
    max_tokens: int
    priority: str
    queue_s: float = LONG_S
    compute_s: float = LONG_S
    cancel_after_s: float | None = None
    twice: bool = False
    tries: int = 2
    poison: Poison | None = None

    @property
    def output(self) -> tuple[list[int], str]:
        return output_of(self.seed, self.max_tokens)

    @property
    def must_finish(self) -> bool:
        """Nothing but a fault can end it early, and no fault may."""
        return self.poison is None and self == _plain(self)


@dataclass(frozen=True)
class Fault:
    """At the moment `at`, or as the n-th message that changes something arrives. It happens to a process that `pick`
    chooses, or to the message's sender."""

    kind: FaultKind
    lasts_s: float
    pick: float
    at: float | None = None
    at_event: int | None = None
    to_sender: bool = True
    delay_s: float = 0.0
    severity: float = 0.0


@dataclass(frozen=True)
class Plan:
    seed: int
    theme: str
    prefills: int
    decodes: int
    gateways: int
    slots: int
    latency_s: float
    step_s: float
    sets_up_streams: bool
    requests: list[Asked] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    patience_s: float = PATIENCE_S
    buffer_bytes: int = BUFFER_BYTES

    @property
    def crashes(self) -> bool:
        """Whether a worker may die, or look dead to another that lives; no outage of NATS alone makes it so."""
        return self.theme == "poison" or any(fault.kind not in ("nats", "outage") for fault in self.faults)


def draw_plan(seed: int) -> Plan:
    draw = random.Random(f"plan-{seed}")
    theme = draw.choices(list(THEMES), [weight for weight, _ in THEMES.values()])[0]
    kinds = THEMES[theme][1]
    if theme == "poison":
        requests = [_request(draw, n, spread_s=8.0) for n in range(draw.randint(3, 7))]
        victim = draw.randrange(len(requests))
        poison = Poison(draw.choice(("prefill", "decode")), draw.randint(1, 2))
        requests[victim] = replace(_plain(requests[victim]), max_tokens=draw.choice((4, 8, 12)), poison=poison)
    else:
        requests = [_request(draw, n, spread_s=1.5) for n in range(draw.randint(1, 4))]
    return Plan(
        seed=seed,
        theme=theme,
        prefills=draw.choice((1, 1, 2)),
        decodes=draw.choice((1, 2, 2, 3)),
        gateways=draw.choice((1, 1, 2)),
        slots=draw.choice((1, 2, 4)) if theme != "poison" else draw.choice((2, 4)),
        latency_s=draw.choice((0.0001, 0.001, 0.01)),
        step_s=draw.choice((0.005, 0.05, 0.3)),
        sets_up_streams=draw.random() < 0.1,
        requests=requests,
        faults=[_fault(draw, draw.choice(kinds)) for _ in range(draw.randint(1, 4))] if kinds else [],
        patience_s=OUTLASTED_S if theme == "outage" else PATIENCE_S,
        buffer_bytes=draw.choice((0, 0, BUFFER_BYTES)) if theme == "outage" else BUFFER_BYTES,
    )


def _plain(asked: Asked) -> Asked:
    """The same without anything that ends it early."""
    return replace(asked, cancel_after_s=None, queue_s=LONG_S, compute_s=LONG_S)


def _request(draw: random.Random, n: int, spread_s: float) -> Asked:
    asked = Asked(
        key=f"r{n}",
        at=draw.uniform(0.0, spread_s) if draw.random() < 0.7 else 0.0,
        prompt=draw.randint(1, 20),
        seed=draw.randrange(1_000),
        max_tokens=draw.choice((1, 2, 4, 8, 12)),
        priority=draw.choice(("normal", "normal", "high", "low")),
        twice=draw.random() < 0.15,
        tries=draw.choice((1, 2, 3)),
    )
    match draw.randrange(12):
        case 0 | 1:
            return replace(asked, cancel_after_s=draw.uniform(0.0, 2.0))
        case 2:
            return replace(asked, queue_s=draw.uniform(0.2, 4.0))
        case 3 | 4:
            return replace(asked, compute_s=draw.uniform(0.1, 4.0))
    return asked


def _fault(draw: random.Random, kind: FaultKind) -> Fault:
    at_event = draw.randint(1, 40 if kind != "outage" else 12) if kind == "kill_before" or draw.random() < 0.7 else None
    lasts_s = draw.choice((0.05, 0.5, 2.5, 4.0, 8.0)) if kind != "outage" else OUTAGE_S
    return Fault(
        kind=kind,
        lasts_s=lasts_s * draw.uniform(0.7, 1.3),
        pick=draw.random(),
        at=draw.uniform(0.0, 4.0) if at_event is None else None,
        at_event=at_event,
        to_sender=kind == "kill_before" or draw.random() < 0.7,
        delay_s=draw.choice((0.0, 0.0001, 0.001, 0.01)),
        severity=draw.choice((0.02, 0.05, 0.15, 0.3)),
    )
