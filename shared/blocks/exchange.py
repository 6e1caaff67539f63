"""The client's half of each exchange with a store, on one connection. Raises TransportError; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from shared.blocks.checksum import receive_hashed
from shared.protocol.kv import (
    AskStats,
    BlockMeta,
    Corrupt,
    Doubt,
    Find,
    Found,
    Get,
    Held,
    Lease,
    Put,
    Refusal,
    Release,
    Renew,
    Reply,
    Request,
    Sending,
    Stats,
    Verdict,
    Verdicts,
    decode_reply,
    encode_kv,
)
from shared.transport import Buffer, Connection, PeerRefused, ProtocolViolation

R = TypeVar("R", bound=Reply)


async def _receive(connection: Connection, expected: type[R]) -> R:
    data = await connection.receive_header()
    try:
        reply = decode_reply(data)
    except msgspec.DecodeError as error:
        connection.close()
        raise ProtocolViolation(f"{connection.peer} answered what cannot be read: {error}") from error
    if isinstance(reply, Refusal):
        raise PeerRefused(f"{connection.peer} refused: {reply.reason}")
    if not isinstance(reply, expected):
        connection.close()
        raise ProtocolViolation(f"{connection.peer} answered {type(reply).__name__}, not {expected.__name__}")
    return reply


async def _ask(connection: Connection, request: Request, expected: type[R]) -> R:
    await connection.send_header(encode_kv(request))
    return await _receive(connection, expected)


def _check_length(connection: Connection, got: int, asked: int) -> None:
    if got != asked:
        connection.close()
        raise ProtocolViolation(f"{connection.peer} answered for {got} blocks; {asked} were asked for")


async def find_blocks(connection: Connection, keys: Sequence[bytes]) -> list[BlockMeta | None]:
    """At most MAX_BLOCKS keys, as in all of these."""
    found = await _ask(connection, Find(list(keys)), Found)
    _check_length(connection, len(found.blocks), len(keys))
    return found.blocks


async def get_blocks(connection: Connection, blocks: Sequence[BlockMeta], into: Sequence[Buffer]) -> list[int | None]:
    """Fill the buffers of those that the store has, `blocks[i].n_bytes` each.

    One entry per block: the checksum of what arrived, which the caller compares; None where the store has none.
    """
    sending = await _ask(connection, Get(list(blocks)), Sending)
    _check_length(connection, len(sending.present), len(blocks))
    present = [buffer for buffer, here in zip(into, sending.present, strict=True) if here]
    sums = iter(await receive_hashed(connection, present))
    return [next(sums) if here else None for here in sending.present]


async def put_blocks(
    connection: Connection,
    blocks: Sequence[BlockMeta],
    buffers: Sequence[Buffer],
    lease_id: str,
    lease_s: float,
    tenant: str = "",
) -> list[Verdict]:
    """Send the blocks that the store does not have yet, in one go. The answer holds no `want`."""
    plan = await _ask(connection, Put(list(blocks), lease_id, lease_s, tenant), Verdicts)
    _check_length(connection, len(plan.blocks), len(blocks))
    wanted = [buffer for buffer, verdict in zip(buffers, plan.blocks, strict=True) if verdict == "want"]
    if not wanted:
        return plan.blocks
    await connection.send_buffers(wanted)
    outcome = await _receive(connection, Verdicts)
    _check_length(connection, len(outcome.blocks), len(blocks))
    return outcome.blocks


async def lease_blocks(
    connection: Connection, lease_id: str, keys: Sequence[bytes], lease_s: float, tenant: str = ""
) -> list[bool]:
    held = await _ask(connection, Lease(lease_id, list(keys), lease_s, tenant), Held)
    _check_length(connection, len(held.held), len(keys))
    return held.held


async def renew_lease(connection: Connection, lease_id: str, lease_s: float) -> bool:
    return all((await _ask(connection, Renew(lease_id, lease_s), Held)).held)


async def release_lease(connection: Connection, lease_id: str) -> bool:
    return all((await _ask(connection, Release(lease_id), Held)).held)


async def doubt_blocks(connection: Connection, keys: Sequence[bytes]) -> list[bool]:
    """Let the store check its copies and drop damaged ones. One entry per key: whether it has a good one."""
    held = await _ask(connection, Doubt(list(keys)), Held)
    _check_length(connection, len(held.held), len(keys))
    return held.held


async def ask_stats(connection: Connection) -> Stats:
    return await _ask(connection, AskStats(), Stats)


async def corrupt_block(connection: Connection, key: bytes) -> bool:
    """For tests of the checksum, on stores that were started with fault injection; others refuse (PeerRefused)."""
    return all((await _ask(connection, Corrupt(key), Held)).held)
