"""The first records of a log, without the rest: who asked for what by when, and when the first worker took it."""

from __future__ import annotations

from typing import Final

import msgspec
from nats.js.errors import NotFoundError

from shared.bus import Bus, RequestKey
from shared.protocol.records import Accepted, Claimed, Record, decode_record
from shared.protocol.streams import LOG
from shared.protocol.subjects import log_subject

FIRST: Final = 2
"""A log begins with `Accepted`; behind it comes a claim, or the end."""


async def read_opening(bus: Bus, key: RequestKey) -> tuple[Accepted | None, Claimed | None]:
    """None for what is not there, or is something else. Raises what NATS raises."""
    records: list[Record] = []
    seq = 1
    for _ in range(FIRST):
        try:
            message = await bus.js.get_msg(LOG.name, seq=seq, subject=log_subject(*key), direct=True, next=True)
            records.append(decode_record(message.data or b""))
        except (NotFoundError, msgspec.DecodeError):
            break
        seq = (message.seq or 0) + 1
    accepted = records[0] if records and isinstance(records[0], Accepted) else None
    claim = records[1] if len(records) == FIRST and isinstance(records[1], Claimed) else None
    return accepted, claim
