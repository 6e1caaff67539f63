"""Which request comes next: prompt text and output length of request number i, the same for the same seed. Pure.

There is no tokenizer here: a prompt is made of common words, and two probes of the server tell what a word costs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from loadgen.lengths import Lengths
from loadgen.traces import TraceRequest

_COMMON_WORDS: Final = (
    "river mill water stone bread story light winter garden letter engine paper window music silver forest market "
    "bridge summer field house horse morning evening children mother father green white black small large round "
    "table chair glass metal wheel road city town ship island ocean cloud rain snow wind fire earth gold copper"
)
WORDS: Final = tuple(_COMMON_WORDS.split())
"""Each is one token in the usual vocabularies, with the blank before it."""
SHARED_SEED: Final = "shared prefix"


@dataclass(frozen=True)
class RequestSpec:
    """One request to send. `asked_prompt_tokens` is the aim; what the server counted is in the outcome."""

    number: int
    prompt: str
    asked_prompt_tokens: int
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class TokenCost:
    """Prompt tokens of a request: `fixed` (template, greeting) + `per_word` for each word."""

    fixed: float = 0.0
    per_word: float = 1.0

    def words_for(self, tokens: int) -> int:
        return max(1, round((tokens - self.fixed) / self.per_word))

    @classmethod
    def from_probes(cls, few: tuple[int, int], many: tuple[int, int]) -> TokenCost:
        """From two (words, prompt tokens). Falls back to a token a word where the server's counts make no sense."""
        per_word = (many[1] - few[1]) / (many[0] - few[0])
        if per_word <= 0:
            return cls()
        return cls(fixed=few[1] - per_word * few[0], per_word=per_word)


class Planner(Protocol):
    """Makes request number i, from 0 on. The same number gives the same request."""

    def request(self, number: int) -> RequestSpec: ...


@dataclass(frozen=True)
class SyntheticPlanner:
    """Requests of drawn lengths. Each prompt begins with words of its own, after `shared_prefix_tokens` common ones."""

    seed: int
    prompt: Lengths
    output: Lengths
    cost: TokenCost = TokenCost()
    shared_prefix_tokens: int = 0
    label: str = ""

    def request(self, number: int) -> RequestSpec:
        rng = random.Random(f"{self.label}:{self.seed}:{number}")
        tokens = self.prompt.sample(rng)
        max_tokens = self.output.sample(rng)
        wanted = self.cost.words_for(tokens)
        shared = min(wanted - 1, round(self.shared_prefix_tokens / self.cost.per_word))
        text = words(SHARED_SEED, max(0, shared)) + words(f"{self.label}:{self.seed}:{number}", wanted - max(0, shared))
        return RequestSpec(number, " ".join(text), tokens, max_tokens, rng.getrandbits(31))


@dataclass(frozen=True)
class TracePlanner:
    """Requests of a trace. Equal block ids at the start of two requests give them an equal start of their prompts."""

    seed: int
    requests: Sequence[TraceRequest]
    cost: TokenCost = TokenCost()

    def request(self, number: int) -> RequestSpec:
        """Raises IndexError past the end of the trace."""
        traced = self.requests[number]
        wanted = self.cost.words_for(traced.prompt_tokens)
        text: list[str] = []
        if traced.block_tokens:
            per_block = max(1, round(traced.block_tokens / self.cost.per_word))
            for block in traced.block_ids:
                text += words(f"block:{block}", per_block)
        text = text[: wanted - 1]
        text += words(f"tail:{self.seed}:{number}", wanted - len(text))
        rng = random.Random(f"trace:{self.seed}:{number}")
        return RequestSpec(number, " ".join(text), traced.prompt_tokens, traced.output_tokens, rng.getrandbits(31))


def words(seed: str, count: int) -> list[str]:
    return random.Random(seed).choices(WORDS, k=count)
