"""Texts, edits and a decoder for tests of the model-free proposers. Everything follows from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from shared.speculation import Proposer

VOCABULARY = 2_000


def text(rng: random.Random, length: int) -> list[int]:
    """Tokens that are as unequal in frequency as words, with phrases that come back: no n-gram is safe from doubles."""
    phrases = [[_word(rng) for _ in range(rng.randint(2, 6))] for _ in range(40)]
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += rng.choice(phrases) if rng.random() < 0.3 else [_word(rng)]
    return tokens[:length]


def edited(rng: random.Random, original: Sequence[int], rate: float, kinds: str = "rid") -> list[int]:
    """`original` with a change at a share `rate` of its tokens: (r)eplaced, (i)nserted or (d)eleted ones."""
    result: list[int] = []
    at = 0
    while at < len(original):
        if rng.random() >= rate:
            result.append(original[at])
            at += 1
            continue
        kind = rng.choice(kinds)
        if kind in "ri":
            result += [_word(rng) for _ in range(rng.randint(1, 5))]
        if kind in "rd":
            at += rng.randint(1, 5)
    return result


@dataclass
class Decoded:
    steps: int = 0
    drafted: int = 0
    accepted: int = 0


def decode(proposer: Proposer, prompt: Sequence[int], output: Sequence[int], most: int = 8) -> Decoded:
    """Generate `output` with the proposer's guesses verified at every step."""
    result = Decoded()
    proposer.extend(prompt)
    done = 0
    while done < len(output):
        guess = proposer.propose(most)
        tokens = guess.token_ids if guess is not None else ()
        right = common_prefix(tokens, output[done:])
        result.steps += 1
        result.drafted += len(tokens)
        result.accepted += right
        proposer.extend(output[done : done + right + 1])
        done += right + 1
    return result


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return length


def _word(rng: random.Random) -> int:
    return int(VOCABULARY ** rng.random())
