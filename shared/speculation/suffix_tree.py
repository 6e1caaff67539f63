"""Guesses from the recent outputs of all requests of the same tenant.

Source: Oliaro, Jia, Campos, Qiao, SuffixDecoding (2024): match the sequence's tail against earlier outputs, go on with
the most frequent continuation, and guess the further the surer it is. Wins on agents, edits and repeated questions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from shared.speculation.proposer import Guess
from shared.speculation.suffix_index import DEPTH, SuffixIndex

SUFFIX_TREE = "suffix_tree"

LEAST_PROBABILITY = 0.1
"""A guess ends where the probability that all of it is right falls below this."""


class RecentOutputs:
    """The newest outputs of each tenant. Tenants share nothing; the least recently used one is forgotten first.

    Bounded: `max_tenants` indexes of at most `max_tokens` cells (see SuffixIndex) with 44 bytes a cell.
    """

    def __init__(self, max_tokens: int = 65_536, max_tenants: int = 32) -> None:
        self._max_tokens = max_tokens
        self._max_tenants = max_tenants
        self._indexes: OrderedDict[str, SuffixIndex] = OrderedDict()

    def __len__(self) -> int:
        """Tenants known."""
        return len(self._indexes)

    def add(self, tenant: str, tokens: Sequence[int], prompt: Sequence[int] = ()) -> None:
        """Remember a finished output, writing over the oldest ones where there is no room left.

        With it goes the end of its prompt, so that the same question finds its answer at the first token.
        """
        if not tokens:
            return
        index = self.of(tenant)
        if index is None:
            while len(self._indexes) >= self._max_tenants:
                self._indexes.popitem(last=False)
            index = self._indexes[tenant] = SuffixIndex(self._max_tokens)
        index.extend([*prompt[-DEPTH:], *tokens])
        index.begin_text()

    def of(self, tenant: str) -> SuffixIndex | None:
        """The outputs of one tenant, which counts as a use of them; None where there are none."""
        index = self._indexes.get(tenant)
        if index is not None:
            self._indexes.move_to_end(tenant)
        return index


class SuffixProposer:
    """Continues one sequence of a tenant as its recent outputs went on. Keeps the sequence's tail alone."""

    name = SUFFIX_TREE

    def __init__(self, outputs: RecentOutputs, tenant: str) -> None:
        self._outputs = outputs
        self._tenant = tenant
        self._length = 0
        self._tail: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        self._length += len(tokens)
        self._tail = [*self._tail, *tokens[-DEPTH:]][-DEPTH:]

    def propose(self, max_tokens: int) -> Guess | None:
        index = self._outputs.of(self._tenant)
        if index is None:
            return None
        length, positions = index.longest_match(self._tail)
        guess, confidence = index.follow(length, positions, max_tokens, LEAST_PROBABILITY)
        if not guess:
            return None
        return Guess(self._length, tuple(guess), tuple(confidence), self.name)
