"""What a stack consists of, as a value: which instances of which stage, which servers, on which ports."""

from __future__ import annotations

import math
import re
from typing import Final, Literal

import msgspec

from services.cli.errors import UnknownTarget
from services.cli.settings import MAX_INSTANCES
from shared.protocol.subjects import STAGES, Stage

Server = Literal["nats", "valkey"]

SERVERS: Final[tuple[Server, ...]] = ("nats", "valkey")
START_ORDER: Final[tuple[Stage, ...]] = ("kvstore", "prefill", "decode", "draft", "gateway")

STOP_WAIT_S: Final = 35
"""After SIGTERM an instance has this long at least to hand its work back; then it is killed."""

_BEHIND_DRAIN_S: Final = 15
"""What an instance needs behind its drain time at most. Gateways need most: their clients have 6 s to go elsewhere,
what came over NATS is finished in 4 s, and a NATS server that is away costs 5 s more."""

SPARE: Final = "spare"
"""What a spare has in place of a number."""

_TARGET = re.compile(rf"([a-z]+)(?:[#-](\d{{1,3}}|{SPARE}))?")
_SCALE = re.compile(r"([a-z]+)=(\d{1,4})")


class StackSpec(msgspec.Struct, frozen=True):
    """Kept in the state directory while a stack is up, so that later commands see what `up` saw.

    `stack_id` marks every process of this run. An empty `servers` means that NATS and Redis are run by somebody else.
    `spares` are the instances beside `counts` that stand in while others restart, one of a stage at most, each with the
    number of the instance that it stands in for. A command that was killed leaves them here, and the next one that
    changes their stage removes them. `stop_wait_s` after SIGTERM an instance is killed; kept here, since a later
    command may run with another drain time in its environment.
    """

    stack_id: str
    model: str
    nats_url: str
    redis_url: str
    servers: tuple[Server, ...]
    nats_port: int
    redis_port: int
    gateway_port: int
    counts: dict[Stage, int]
    draft_model: str = ""
    spares: dict[Stage, int] = {}
    stop_wait_s: int = STOP_WAIT_S
    v: int = 1

    def instances(self, stage: Stage) -> list[str]:
        """The numbered ones."""
        return [f"{stage}-{n}" for n in range(self.counts.get(stage, 0))]

    def with_spare(self, stage: Stage) -> list[str]:
        return [*self.instances(stage), *([spare_of(stage)] if stage in self.spares else [])]

    def all_instances(self) -> list[str]:
        return [name for stage in START_ORDER for name in self.with_spare(stage)]

    def programs(self) -> list[str]:
        """Every supervised process by name, servers first."""
        return [*self.servers, *self.all_instances()]

    def scaled(self, stage: Stage, count: int) -> StackSpec:
        return msgspec.structs.replace(self, counts={**self.counts, stage: count})

    def sparing(self, stage: Stage, number: int) -> StackSpec:
        """With a spare of the stage that stands in for the instance of this number."""
        return msgspec.structs.replace(self, spares={**self.spares, stage: number})

    def without_spare(self, stage: Stage) -> StackSpec:
        return msgspec.structs.replace(self, spares={s: n for s, n in self.spares.items() if s != stage})

    def port_of(self, gateway: str) -> int:
        """Where a gateway listens; a spare shares the port of the one that it stands in for."""
        number = self.spares["gateway"] if gateway == spare_of("gateway") else number_of(gateway)
        return self.gateway_port + number

    def gateway_url(self, number: int = 0) -> str:
        return f"http://127.0.0.1:{self.gateway_port + number}"


def stop_wait_s(drain_s: float) -> int:
    """How long after SIGTERM an instance is killed whose work may take `drain_s` to be handed back."""
    return max(STOP_WAIT_S, math.ceil(drain_s) + _BEHIND_DRAIN_S)


def parse_stage(name: str) -> Stage:
    """Raises UnknownTarget, which lists the stages."""
    for stage in STAGES:
        if stage == name:
            return stage
    raise UnknownTarget(f"no stage {name!r}; stages are {', '.join(STAGES)}")


def parse_scale(text: str) -> tuple[Stage, int]:
    """`decode=2` as (stage, count). Raises UnknownTarget."""
    match = _SCALE.fullmatch(text)
    if match is None:
        raise UnknownTarget(f"{text!r} is not STAGE=N, for example decode=2")
    count = int(match.group(2))
    if count > MAX_INSTANCES:
        raise UnknownTarget(f"{text!r}: at most {MAX_INSTANCES} instances of a stage")
    return parse_stage(match.group(1)), count


def select(spec: StackSpec, target: str) -> list[str]:
    """The programs that `decode` (all of the stage), `decode#1`, `decode-1`, `decode#spare`, `nats` or `valkey` name.

    Raises UnknownTarget when there is none.
    """
    match = _TARGET.fullmatch(target)
    name = match.group(1) if match else target
    if name in SERVERS and match and match.group(2) is None:
        if name not in spec.servers:
            raise UnknownTarget(f"{name} is not run by this stack (an external server is configured)")
        return [name]
    if name not in STAGES:
        raise UnknownTarget(f"no stage or server {target!r}; there are {', '.join((*STAGES, *spec.servers))}")
    present = spec.with_spare(parse_stage(name))
    which = match.group(2) if match else None
    wanted = present if which is None else [f"{name}-{which if which == SPARE else int(which)}"]
    if not wanted or not set(wanted) <= set(present):
        raise UnknownTarget(f"no instance {target!r}; running are {', '.join(present) or 'none of this stage'}")
    return wanted


def stage_of(program: str) -> str:
    """`decode` of `decode-1`; a server is its own stage."""
    return program.rsplit("-", 1)[0]


def number_of(instance: str) -> int:
    """1 of `decode-1`."""
    return int(instance.rsplit("-", 1)[1])


def spare_of(stage: Stage) -> str:
    return f"{stage}-{SPARE}"
