"""Traffic between decode and draft: core NATS, MessagePack, never stored. Losing any of it costs speed only."""

from __future__ import annotations

import msgspec


class DraftContext(msgspec.Struct, frozen=True, omit_defaults=True):
    """Decode tells a drafter the tokens `start .. start+len(token_ids)-1` of a sequence (prompt and output).

    A context with `start` 0 replaces what the drafter knew; others extend it. `forget` ends the sequence. Sampling
    fields couple the drafter's noise to the target's.
    """

    request_id: str
    tenant: str
    start: int
    token_ids: list[int]
    reply_to: str
    max_tokens: int = 4
    seed: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    forget: bool = False
    v: int = 1


class Proposal(msgspec.Struct, frozen=True, omit_defaults=True):
    """Guessed tokens from position `start` on. `resend` asks for the whole context: the drafter does not have it."""

    request_id: str
    start: int
    token_ids: list[int]
    proposer: str = ""
    resend: bool = False
    v: int = 1


_encoder = msgspec.msgpack.Encoder()
_context_decoder = msgspec.msgpack.Decoder(DraftContext)
_proposal_decoder = msgspec.msgpack.Decoder(Proposal)


def encode_draft(message: DraftContext | Proposal) -> bytes:
    return _encoder.encode(message)


def decode_context(data: bytes) -> DraftContext:
    return _context_decoder.decode(data)


def decode_proposal(data: bytes) -> Proposal:
    return _proposal_decoder.decode(data)
