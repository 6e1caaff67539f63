"""Work messages: what the gateway hands to prefill and prefill hands to decode. MessagePack, internal."""

from __future__ import annotations

from typing import Literal

import msgspec

from shared.protocol.blocks import Manifest
from shared.protocol.records import Api
from shared.protocol.subjects import Priority


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to choose tokens. Temperature 0 is greedy; `top_k` 0 and `top_p` 1 switch the filters off.

    `stop_token_ids` are beside the model's own end-of-sequence ids, which `ignore_eos` switches off. Neither is chosen
    before `min_tokens` tokens of output. `logit_bias` is added by token id. Presence and frequency penalties are
    OpenAI's and look at the output; the repetition penalty (Keskar et al. 2019, CTRL) looks at prompt and output, and 1
    switches it off. `logprobs` asks for each token's log probability and that many alternatives; None is off.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    logprobs: int | None = None


class GenerationRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """An accepted request. `log_seq` is the stream sequence of its `Accepted` record.

    `queue_deadline_unix_s` bounds the wait for the first worker, `compute_timeout_s` the time from its claim to the
    end, and `deadline_unix_s` the whole request, whatever happens; see `shared.protocol.deadlines`.
    `salt` separates the KV blocks of tenants. `prediction_ids` are what the output is likely to repeat; they do
    not change it.
    """

    request_id: str
    tenant: str
    model: str
    api: Api
    priority: Priority
    prompt_ids: list[int]
    params: SamplingParams
    created_unix_s: float
    queue_deadline_unix_s: float
    deadline_unix_s: float
    log_seq: int
    compute_timeout_s: float = 0.0
    salt: str = ""
    speculation: Literal["auto", "off"] = "auto"
    prediction_ids: list[int] = []
    v: int = 1


class DecodeJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prefilled request: its KV blocks and the tokens that its log held at hand-over (`log_seq`, `epoch`).

    `first_claim_unix_s` is when its compute time began, see `shared.protocol.deadlines`; 0 when unknown.
    """

    request: GenerationRequest
    manifest: Manifest
    output_ids: list[int]
    epoch: int
    log_seq: int
    published_unix_s: float
    cached_tokens: int = 0
    first_claim_unix_s: float = 0.0
    v: int = 1


_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(GenerationRequest)
_job_decoder = msgspec.msgpack.Decoder(DecodeJob)


def encode_work(message: GenerationRequest | DecodeJob) -> bytes:
    return _encoder.encode(message)


def decode_request(data: bytes) -> GenerationRequest:
    """Raises msgspec.ValidationError or msgspec.DecodeError."""
    return _request_decoder.decode(data)


def decode_job(data: bytes) -> DecodeJob:
    """Raises msgspec.ValidationError or msgspec.DecodeError."""
    return _job_decoder.decode(data)
