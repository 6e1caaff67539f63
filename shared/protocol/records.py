"""The records of a request's log: the only truth about what happened to a request.

A log is the subject `hr.tok.<tenant>.<request>`; records are JSON, so that `nats sub 'hr.live.>'` reads well. A log
holds one `Accepted`, any number of `Claimed`, `HandedBack` and `Tokens`, and ends with exactly one `Ended`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "tool_calls", "cancelled", "error"]
Api = Literal["chat", "completion"]


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error in OpenAI's shape. `code` is stable and may be matched on; `message` is for people."""

    message: str
    type: str = "server_error"
    code: str | None = None
    param: str | None = None


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Token counts of one request. `drafted_tokens` counts verified proposals, accepted or not."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Accepted(msgspec.Struct, frozen=True, tag_field="type", tag="accepted", omit_defaults=True):
    """First record, written by the gateway before the request is queued."""

    request_id: str
    tenant: str
    model: str
    api: Api
    created_unix_s: float
    deadline_unix_s: float
    prompt_tokens: int
    seed: int
    priority: str = "normal"
    gateway: str = ""
    include_usage: bool = False
    body_digest: str = ""
    """Set for a request with an idempotency key: what a retry must ask for to join this run."""
    choices: int = 1
    """How many answers were asked for. Above 1 the others have logs of their own, see `choice_request_id`."""
    choice: int = 0
    """Which of the answers this log holds; 0 in the log that carries the request's own id."""
    prompt: int = 0
    """Which of the request's prompts this answer continues."""
    logprobs: int | None = None
    queue_deadline_unix_s: float = 0.0
    """When the wait for the first worker ends; 0 where `deadline_unix_s` alone counts."""
    compute_timeout_s: float = 0.0
    """Time from the first claim to the end; 0 where `deadline_unix_s` alone counts. See `shared.protocol.deadlines`."""
    background: bool = False
    """The client may go away and come back: the request then outlives it by a grace period."""
    v: int = 1


class Claimed(msgspec.Struct, frozen=True, tag_field="type", tag="claim", omit_defaults=True):
    """A worker takes the request over. `epoch` grows by one with each claim; later appends carry it.

    `alone`: the worker serves nothing else meanwhile, since earlier holders of the request have crashed.
    """

    epoch: int
    stage: Literal["prefill", "decode"]
    worker: str
    at_unix_s: float
    alone: bool = False
    v: int = 1


class HandedBack(msgspec.Struct, frozen=True, tag_field="type", tag="hand_back", omit_defaults=True):
    """A holder gave the request back in good order (drain, restart): its claim is no sign of a crash."""

    epoch: int
    stage: Literal["prefill", "decode"]
    worker: str
    v: int = 1


class TokenLogprobs(msgspec.Struct, frozen=True, omit_defaults=True):
    """Natural log probabilities under the model's own distribution: before penalties, bias, temperature and filters.

    `top` are the most probable tokens, best first: (token id, log probability).
    """

    logprob: float
    top: list[tuple[int, float]] = []


class Tokens(msgspec.Struct, frozen=True, tag_field="type", tag="tokens", omit_defaults=True):
    """Tokens `index .. index+len(ids)-1` of the output. `text` is what these ids add to the visible text.

    Text that may still grow into a stop string or a whole character is held back and comes with a later record.
    `logprobs` has one entry for each id if the request asked for them, else none.
    """

    epoch: int
    index: int
    ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] = []
    v: int = 1


class Ended(msgspec.Struct, frozen=True, tag_field="type", tag="end", omit_defaults=True):
    """The terminal record. After it the log never changes."""

    epoch: int
    reason: FinishReason
    usage: Usage
    error: ErrorInfo | None = None
    by: str = ""
    v: int = 1


Record = Accepted | Claimed | HandedBack | Tokens | Ended

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


def choice_request_id(request_id: str, choice: int) -> str:
    """The id under which answer `choice` of a request is queued and logged: the request's own for the first."""
    return request_id if choice == 0 else f"{request_id}-c{choice}"


def encode_record(record: Record) -> bytes:
    return _encoder.encode(record)


def decode_record(data: bytes) -> Record:
    """Raises msgspec.ValidationError (names the field) or msgspec.DecodeError."""
    return _decoder.decode(data)
