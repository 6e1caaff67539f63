"""Which requests a run sends: the same for the same seed, in waves that each hold the whole mix. Pure.

A wave is what is in flight when one fault strikes. Its kinds are fixed, so that every fault meets streams and whole
answers, greedy and sampled ones, with and without speculation, HTTP and NATS; who gets which kind is drawn.
"""

from __future__ import annotations

import random
from typing import Any, Final, Literal

import msgspec

from loadgen.plan import words

Api = Literal["chat", "completion"]
Client = Literal["stream", "whole", "nats"]
Prompt = Literal["short", "shared", "long", "repeat"]

WAVE: Final = 8
"""Requests of one wave."""

OUTPUT_TOKENS: Final = 48
SHORT_WORDS: Final = (8, 40)
SHARED_WORDS: Final = 160
LONG_WORDS: Final = (420, 560)
REPEATED_WORDS: Final = 24
FAMILIES: Final = 3
"""Requests of one family begin alike, so that they meet in the prefix caches."""


class Request(msgspec.Struct, frozen=True):
    """One request. `body` lacks the model and whether it streams; `gateway` counts modulo those that there are.

    `readers` are more clients on the same answer: each follows it from its beginning, over HTTP or NATS.
    """

    number: int
    api: Api
    body: dict[str, Any]
    client: Client
    gateway: int
    prompt: Prompt
    include_usage: bool = False
    readers: tuple[Client, ...] = ()

    @property
    def choices(self) -> int:
        return int(self.body.get("n", 1))

    @property
    def speculates(self) -> bool:
        return "speculation" not in self.body or self.body["speculation"] == "auto"

    @property
    def logprobs(self) -> bool:
        return self.body.get("logprobs") is not None


class _Kind(msgspec.Struct, frozen=True):
    client: Client
    prompt: Prompt
    readers: tuple[Client, ...] = ()
    choices: int = 1


_KINDS: Final = (
    _Kind("stream", "short", readers=("stream", "nats")),
    _Kind("stream", "long"),
    _Kind("stream", "repeat"),
    _Kind("stream", "shared", choices=2),
    _Kind("whole", "shared"),
    _Kind("whole", "repeat"),
    _Kind("nats", "short", readers=("stream",)),
    _Kind("nats", "long"),
)

_SAMPLING: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 0},
    {"temperature": 0, "presence_penalty": 0.6, "frequency_penalty": 0.3},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.9, "top_k": 40, "repetition_penalty": 1.1},
    {"temperature": 1.2, "min_p": 0.05},
)


def wave_of_requests(seed: int, wave: int) -> list[Request]:
    """The requests of one wave, in the order in which they are sent."""
    rng = random.Random(f"{seed}:wave:{wave}")
    kinds = list(_KINDS)
    rng.shuffle(kinds)
    speculation = ["auto", "off"] * (WAVE // 2)
    rng.shuffle(speculation)
    sampling = [*_SAMPLING, *rng.sample(_SAMPLING, WAVE - len(_SAMPLING))]
    rng.shuffle(sampling)
    first = wave * WAVE
    return [
        _request(seed, first + place, kind, sampling[place], speculation[place], rng)
        for place, kind in enumerate(kinds)
    ]


def _request(
    seed: int, number: int, kind: _Kind, sampling: dict[str, Any], speculation: str, rng: random.Random
) -> Request:
    api: Api = "completion" if rng.random() < 0.3 else "chat"
    body: dict[str, Any] = {
        "max_tokens": OUTPUT_TOKENS,
        "seed": rng.getrandbits(40),
        "speculation": speculation,
        "priority": rng.choice(("high", "normal", "normal", "low")),
        **sampling,
    }
    if rng.random() < 0.8:
        body["ignore_eos"] = True
    if rng.random() < 0.25:
        body["stop"] = [rng.choice((" the", ".", " and", "\n\n"))]
        body["min_tokens"] = OUTPUT_TOKENS // 2
    if kind.choices > 1:
        body["n"] = kind.choices
    if kind.client != "whole" and rng.random() < 0.3:
        body |= {"logprobs": True, "top_logprobs": 2} if api == "chat" else {"logprobs": 2}
    _put_prompt(body, api, *_prompt(seed, number, kind.prompt, rng))
    return Request(
        number=number,
        api=api,
        body=body,
        client=kind.client,
        gateway=rng.randrange(2),
        prompt=kind.prompt,
        include_usage=kind.client == "stream" and rng.random() < 0.5,
        readers=kind.readers,
    )


def _prompt(seed: int, number: int, prompt: Prompt, rng: random.Random) -> tuple[str, str]:
    """What the prompt begins with, which other requests may share, and what is its own."""
    label = f"{seed}:prompt:{number}"
    match prompt:
        case "short":
            return "", " ".join(words(label, rng.randint(*SHORT_WORDS)))
        case "shared":
            family = " ".join(words(f"{seed}:family:{rng.randrange(FAMILIES)}", SHARED_WORDS))
            return family, " ".join(words(label, rng.randint(*SHORT_WORDS)))
        case "long":
            return "", " ".join(words(label, rng.randint(*LONG_WORDS)))
        case "repeat":  # what a drafter guesses well
            sentence = " ".join(words(label, REPEATED_WORDS))
            return "", f"Repeat these words again and again: {sentence}. {sentence}. {sentence}."


def _put_prompt(body: dict[str, Any], api: Api, head: str, own: str) -> None:
    if api == "completion":
        body["prompt"] = f"{head} {own}".strip()
        return
    messages = [{"role": "system", "content": head}] if head else []
    body["messages"] = [*messages, {"role": "user", "content": own}]
