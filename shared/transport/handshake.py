"""Mutual proof of the shared secret: HMAC over both nonces and everything that the peers say about themselves.

Roles are part of the proof, so it cannot be reflected; the UCX addresses are, so they cannot be swapped. It proves who
starts a connection and does not encrypt what follows: the KV plane belongs on a trusted network.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from typing import Literal

import msgspec

from shared.protocol.kv import (
    KV_VERSION,
    MAX_HANDSHAKE_BYTES,
    NONCE_BYTES,
    Answer,
    Carrier,
    Challenge,
    Greeting,
    Refusal,
    Welcome,
    decode_greeting,
    encode_kv,
)
from shared.transport.errors import PeerRefused, ProtocolViolation
from shared.transport.stream import Stream


class NoPlace(Exception):
    """There are as many connections as there may be."""


class Side(msgspec.Struct, frozen=True):
    """How a peer's UCX worker is reached; empty when the socket carries the blocks."""

    address: bytes = b""
    mark: int = 0


class Agreement(msgspec.Struct, frozen=True):
    """What both sides know after the handshake."""

    carrier: Carrier
    mine: Side
    theirs: Side


def _proof(secret: bytes, role: Literal["client", "store"], challenge: bytes, answer: bytes, *said: object) -> bytes:
    message = msgspec.msgpack.encode(["headrace-kv", KV_VERSION, role, challenge, answer, *said])
    return hmac.digest(secret, message, "sha256")


async def _receive(stream: Stream) -> Greeting:
    try:
        return decode_greeting(await stream.receive_frame(MAX_HANDSHAKE_BYTES))
    except msgspec.DecodeError as error:
        raise ProtocolViolation(f"{stream.peer} does not speak the KV protocol: {error}") from error


async def refuse(stream: Stream, reason: str) -> None:
    await stream.send_frame(encode_kv(Refusal(reason)), MAX_HANDSHAKE_BYTES)


async def greet_as_client(stream: Stream, secret: bytes, sides: dict[Carrier, Side]) -> Agreement:
    """`sides` holds what this process can use. Raises PeerRefused, PeerGone, ProtocolViolation."""
    challenge = await _receive(stream)
    if isinstance(challenge, Refusal):
        raise PeerRefused(f"{stream.peer} refused: {challenge.reason}")
    if not isinstance(challenge, Challenge) or len(challenge.nonce) != NONCE_BYTES:
        raise ProtocolViolation(f"{stream.peer} did not start with a challenge")
    if challenge.v != KV_VERSION:
        raise PeerRefused(f"{stream.peer} speaks KV protocol {challenge.v}, this process {KV_VERSION}")
    carrier = next((c for c in challenge.carriers if c in sides), None)
    if carrier is None:
        raise PeerRefused(f"{stream.peer} offers {challenge.carriers}, this process {sorted(sides)}")
    mine, nonce = sides[carrier], secrets.token_bytes(NONCE_BYTES)
    proof = _proof(secret, "client", challenge.nonce, nonce, carrier, mine.address, mine.mark)
    await stream.send_frame(encode_kv(Answer(nonce, carrier, mine.address, mine.mark, proof)), MAX_HANDSHAKE_BYTES)
    reply = await _receive(stream)
    if isinstance(reply, Refusal):
        raise PeerRefused(f"{stream.peer} refused: {reply.reason}")
    if not isinstance(reply, Welcome):
        raise ProtocolViolation(f"{stream.peer} did not answer the proof")
    expected = _proof(secret, "store", challenge.nonce, nonce, carrier, reply.address, reply.mark)
    if not hmac.compare_digest(expected, reply.proof):
        raise PeerRefused(f"{stream.peer} could not prove the shared secret")
    return Agreement(carrier, mine, Side(reply.address, reply.mark))


async def greet_as_store(
    stream: Stream, secret: bytes, sides: dict[Carrier, Side], take_place: Callable[[], None]
) -> Agreement:
    """`take_place` is called once the client has proved the secret, before it is told so; it may raise NoPlace.

    Raises PeerRefused after telling the client why, PeerGone, ProtocolViolation.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    await stream.send_frame(encode_kv(Challenge(nonce, list(sides))), MAX_HANDSHAKE_BYTES)
    answer = await _receive(stream)
    if not isinstance(answer, Answer) or len(answer.nonce) != NONCE_BYTES:
        raise ProtocolViolation(f"{stream.peer} did not answer the challenge")
    expected = _proof(secret, "client", nonce, answer.nonce, answer.carrier, answer.address, answer.mark)
    if not hmac.compare_digest(expected, answer.proof):
        await refuse(stream, "the shared secrets differ")
        raise PeerRefused(f"{stream.peer} could not prove the shared secret")
    if answer.v != KV_VERSION or answer.carrier not in sides:
        await refuse(stream, f"KV protocol {KV_VERSION} over {sorted(sides)} is spoken here")
        raise PeerRefused(f"{stream.peer} wants KV protocol {answer.v} over {answer.carrier}")
    try:
        take_place()
    except NoPlace as error:
        await refuse(stream, str(error))
        raise PeerRefused(f"{stream.peer} was refused: {error}") from None
    mine = sides[answer.carrier]
    proof = _proof(secret, "store", nonce, answer.nonce, answer.carrier, mine.address, mine.mark)
    await stream.send_frame(encode_kv(Welcome(mine.address, mine.mark, proof)), MAX_HANDSHAKE_BYTES)
    return Agreement(answer.carrier, mine, Side(answer.address, answer.mark))
