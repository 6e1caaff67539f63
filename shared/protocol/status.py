"""What an instance says of itself, each second and when asked: JSON on `hr.status.<stage>.<instance>`."""

from __future__ import annotations

from typing import Literal

import msgspec

from shared.protocol.blocks import Place
from shared.protocol.subjects import Stage

STATUS_INTERVAL_S = 1.0
STATUS_TTL_S = 5.0
"""An instance that was silent for this long counts as gone."""


class InstanceStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """`instance` is the stable name (`decode-0`), `worker` names this run of it and is what claims carry."""

    stage: Stage
    instance: str
    worker: str
    pid: int
    host: str
    started_unix_s: float
    sent_unix_s: float
    state: Literal["starting", "ready", "draining"] = "starting"
    model: str = ""
    layout_id: str = ""
    running: int = 0
    """More than `slots` where it took over what others lost."""
    slots: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_evictable: int = 0
    leases: int = 0
    holds: list[str] = []
    """Ids of the requests that the others leave to this worker: it works on them, claims them just now, or has let them
    go and could not say so in their logs yet."""
    let_go: list[str] = []
    """Ids of requests that it held a moment ago and that another has to take: handed back, or its engine hangs."""
    transport: str = ""
    place: Place | None = None
    metrics_url: str = ""
    url: str = ""
    last_error: str = ""
    last_error_unix_s: float = 0.0
    """When that was; 0 for one that holds now."""
    details: dict[str, float | str] = {}
    v: int = 1


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(InstanceStatus)


def encode_status(status: InstanceStatus) -> bytes:
    return _encoder.encode(status)


def decode_status(data: bytes) -> InstanceStatus:
    return _decoder.decode(data)
