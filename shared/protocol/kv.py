"""What peers of the KV plane say to each other. MessagePack headers of bounded size; block bytes follow beside them.

A connection starts with `Challenge`, `Answer`, `Welcome` (or `Refusal`); after that the client asks and the store
answers, one exchange at a time. `docs/kv-plane.md` draws the exchanges.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

KV_VERSION: Final = 1
KEY_BYTES: Final = 16
MAX_BLOCKS: Final = 256
"""Most blocks in one exchange."""
MAX_HANDSHAKE_BYTES: Final = 16 * 1024
MAX_HEADER_BYTES: Final = 64 * 1024
MAX_LEASE_ID: Final = 128
MAX_TENANT: Final = 256
NONCE_BYTES: Final = 32

Carrier = Literal["ucx", "tcp"]
"""What carries the block bytes of a connection. Headers always travel on its TCP socket."""

Verdict = Literal["want", "stored", "full", "corrupt", "refused"]
"""Fate of one block of a put: `want` asks for its bytes, `stored` has it (already), the rest say why it is not kept."""


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """The store speaks first: its nonce and what it can carry blocks with, best first."""

    nonce: bytes
    carriers: list[Carrier]
    v: int = KV_VERSION


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """The client's proof. `address` is its UCX worker address and `mark` the tag that it listens for (UCX only)."""

    nonce: bytes
    carrier: Carrier
    address: bytes
    mark: int
    proof: bytes
    v: int = KV_VERSION


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The store's proof, and its own UCX address and mark."""

    address: bytes
    mark: int
    proof: bytes


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Why the store hangs up."""

    reason: str


class BlockMeta(msgspec.Struct, frozen=True, array_like=True):
    """What a store knows of a block. `checksum` is xxh3-64 of its `n_bytes`."""

    key: bytes
    n_tokens: int
    n_bytes: int
    checksum: int


class Find(msgspec.Struct, frozen=True, tag="find"):
    """Which of these blocks are here? Answered by `Found`."""

    keys: list[bytes]


class Get(msgspec.Struct, frozen=True, tag="get"):
    """Send these blocks; one of another size or checksum counts as missing. Answered by `Sending`, then bytes."""

    blocks: list[BlockMeta]


class Put(msgspec.Struct, frozen=True, tag="put"):
    """Keep these blocks, leased where `lease_id` is not empty. Answered by `Verdicts` before and after the bytes.

    A lease is named by its request. With the `tenant` the store finds the request's log, and ends the lease by itself
    once that has ended; without, the lease ends when it is released or its time is over.
    """

    blocks: list[BlockMeta]
    lease_id: str = ""
    lease_s: float = 0.0
    tenant: str = ""


class Lease(msgspec.Struct, frozen=True, tag="lease"):
    """Spare these blocks from eviction until `lease_s` from now, like a put's. Answered by `Held`."""

    lease_id: str
    keys: list[bytes]
    lease_s: float
    tenant: str = ""


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """Let the lease end `lease_s` from now, sooner or later than it would have. Puts and leases only make it longer.

    Answered by `Held` with one entry: whether the lease exists.
    """

    lease_id: str
    lease_s: float


class Release(msgspec.Struct, frozen=True, tag="release"):
    """End the lease. Answered like `Renew`."""

    lease_id: str


class Doubt(msgspec.Struct, frozen=True, tag="doubt"):
    """These blocks arrived damaged: check your copies, and drop what is damaged. Answered by `Held`."""

    keys: list[bytes]


class AskStats(msgspec.Struct, frozen=True, tag="stats"):
    """Answered by `Stats`."""


class Corrupt(msgspec.Struct, frozen=True, tag="corrupt"):
    """Flip one byte of a block. Refused unless the store was started with fault injection. Answered by `Held`."""

    key: bytes


class Found(msgspec.Struct, frozen=True, tag="found"):
    """One entry per asked key, in order; None where the block is not here."""

    blocks: list[BlockMeta | None]


class Sending(msgspec.Struct, frozen=True, tag="sending"):
    """One entry per asked block, in order. The bytes of the true ones follow, in order."""

    present: list[bool]


class Verdicts(msgspec.Struct, frozen=True, tag="verdicts"):
    """One entry per block of the put, in order."""

    blocks: list[Verdict]


class Held(msgspec.Struct, frozen=True, tag="held"):
    """One entry per key (or one for the lease): whether it is held now."""

    held: list[bool]


class Stats(msgspec.Struct, frozen=True, tag="stats_are"):
    """Counts of a store; `slots` is the room for blocks of the sizes seen so far."""

    slots: int
    blocks: int
    evictable: int
    leases: int
    capacity_bytes: int
    used_bytes: int
    hits: int
    misses: int
    evictions: int
    refused_full: int
    checksum_failures: int


Greeting = Challenge | Answer | Welcome | Refusal
Request = Find | Get | Put | Lease | Renew | Release | Doubt | AskStats | Corrupt
Reply = Found | Sending | Verdicts | Held | Stats | Refusal

_encoder = msgspec.msgpack.Encoder()
_greeting_decoder = msgspec.msgpack.Decoder(Greeting)
_request_decoder = msgspec.msgpack.Decoder(Request)
_reply_decoder = msgspec.msgpack.Decoder(Reply)


def encode_kv(message: Greeting | Request | Reply) -> bytes:
    return _encoder.encode(message)


def decode_greeting(data: bytes) -> Greeting:
    """Raises msgspec.DecodeError (a ValidationError names the field)."""
    return _greeting_decoder.decode(data)


def decode_request(data: bytes) -> Request:
    """Raises msgspec.DecodeError (a ValidationError names the field)."""
    return _request_decoder.decode(data)


def decode_reply(data: bytes) -> Reply:
    """Raises msgspec.DecodeError (a ValidationError names the field)."""
    return _reply_decoder.decode(data)
