"""A validated generation request, the same for HTTP and NATS. What bodies may look like is `openai_schema`'s."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shared.protocol.records import Api
from shared.protocol.subjects import Priority


@dataclass(frozen=True)
class Messages:
    """A conversation for the chat template: `role` and `content` of each message."""

    items: list[dict[str, str]]


@dataclass(frozen=True)
class TokenIds:
    ids: list[int]


Prompt = Messages | TokenIds | str


@dataclass(frozen=True)
class GenerationCall:
    """`n` answers to each of the prompts; choice `c` continues prompt `c // n`, as in OpenAI's API.

    `logprobs` is the number of alternatives for each token, None for no log probabilities at all. `digest` covers all
    that decides the output, so that a retry under an idempotency key can be told from a mix-up. The time-outs are None
    where the body has none. `background`: the client may go away and come back. The `prediction` is a text that the
    answers are likely to repeat; it makes them faster and changes nothing about them.
    """

    api: Api
    model: str
    prompts: tuple[Prompt, ...]
    n: int
    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[int, float]
    logprobs: int | None
    seed: int | None
    stop: list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    speculation: Literal["auto", "off"]
    priority: Priority
    stream: bool
    include_usage: bool
    user: str
    digest: str
    queue_timeout_s: float | None = None
    timeout_s: float | None = None
    background: bool = False
    prediction: str | TokenIds = ""

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n
