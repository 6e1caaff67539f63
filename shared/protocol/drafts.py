"""Traffic between decode and draft: core NATS, MessagePack, never stored. Losing any of it costs speed only."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from shared.protocol.jobs import SamplingParams

DRAFT_MODEL: Final = "draft_model"
"""Names the proposer that is a model."""

MAX_CONTEXT_TOKENS: Final = 65_536
"""Tokens in one context; what is longer goes in several, each from where the last one ended."""

MAX_PROPOSAL_TOKENS: Final = 64
MAX_FORKS: Final = 7
MAX_ALTERNATIVES: Final = 96
MAX_ALTERNATIVE_TOKENS: Final = 16
MAX_PROPOSALS: Final = 32
"""Proposals in one message."""

MAX_DRAFT_BYTES: Final = 768 << 10
"""Of one message, which must fit NATS's usual payload of 1 MiB."""

_Name = Annotated[str, Meta(max_length=256)]
_Position = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Token = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Alternative = Annotated[list[_Token], Meta(max_length=MAX_ALTERNATIVE_TOKENS)]
_AlternativeConfidence = Annotated[list[float], Meta(max_length=MAX_ALTERNATIVE_TOKENS)]


class DraftContext(msgspec.Struct, frozen=True, omit_defaults=True):
    """Decode tells a drafter the tokens `start .. start+len(token_ids)-1` of a sequence (prompt and output).

    A context with `start` 0 replaces what the drafter knew and carries `num_prompt`, the request's whole `params` and
    its `salt`: so the drafter's choices are coupled to the target's. Others extend it, and may overlap what the drafter
    has. Tokens told are final. `wanted` is how many tokens beyond them decode could use now; 0: keep the sequence and
    propose nothing. `forget` ends the sequence.
    """

    request_id: _Name
    tenant: _Name
    start: _Position
    token_ids: Annotated[list[_Token], Meta(max_length=MAX_CONTEXT_TOKENS)]
    reply_to: _Name
    wanted: Annotated[int, Meta(ge=0, le=MAX_PROPOSAL_TOKENS)] = 0
    num_prompt: _Position = 0
    params: SamplingParams | None = None
    salt: _Name = ""
    forget: bool = False
    v: int = 2


class Proposal(msgspec.Struct, frozen=True, omit_defaults=True):
    """Guessed tokens from position `start` on, which may lie beyond the tokens that decode has: then they go on from
    what the same proposer said before.

    `confidence[i]` is the probability that token i is right if those before it are; one entry per token, or none at
    all. `alternatives` are guesses from `start` on whose first token is another, each to be used where that one came;
    `alternative_confidence` is for each what `confidence` is for `token_ids`. `resend` asks for the whole context: the
    drafter does not have it.
    """

    request_id: _Name
    start: _Position
    token_ids: Annotated[list[_Token], Meta(max_length=MAX_PROPOSAL_TOKENS)]
    proposer: _Name = ""
    confidence: Annotated[list[float], Meta(max_length=MAX_PROPOSAL_TOKENS)] = []
    resend: bool = False
    alternatives: Annotated[list[_Alternative], Meta(max_length=MAX_ALTERNATIVES)] = []
    alternative_confidence: Annotated[list[_AlternativeConfidence], Meta(max_length=MAX_ALTERNATIVES)] = []


class Proposals(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a drafter has to say to one decode worker after one of its steps."""

    items: Annotated[list[Proposal], Meta(max_length=MAX_PROPOSALS)]
    v: int = 2


_encoder = msgspec.msgpack.Encoder()
_context_decoder = msgspec.msgpack.Decoder(DraftContext)
_proposals_decoder = msgspec.msgpack.Decoder(Proposals)


def encode_draft(message: DraftContext | Proposals) -> bytes:
    """Raises ValueError beyond MAX_DRAFT_BYTES, which only strange sampling parameters can reach: send nothing then."""
    data = _encoder.encode(message)
    if len(data) > MAX_DRAFT_BYTES:
        raise ValueError(f"a draft message of {len(data)} bytes is larger than {MAX_DRAFT_BYTES}")
    return data


def decode_context(data: bytes) -> DraftContext:
    """Raises msgspec.DecodeError, also for what is beyond the limits."""
    _check_size(data)
    return _context_decoder.decode(data)


def decode_proposals(data: bytes) -> Proposals:
    """Raises msgspec.DecodeError, also for what is beyond the limits."""
    _check_size(data)
    return _proposals_decoder.decode(data)


def _check_size(data: bytes) -> None:
    if len(data) > MAX_DRAFT_BYTES:
        raise msgspec.DecodeError(f"a draft message of {len(data)} bytes is larger than {MAX_DRAFT_BYTES}")
