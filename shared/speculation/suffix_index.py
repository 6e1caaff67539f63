"""Where did the last tokens of a sequence stand before, and what came next? The index behind the model-free proposers.

It answers what a suffix tree over a sliding window of tokens would: the longest match of a sequence's tail, up to
`DEPTH` tokens, and the counted continuations of it. Inside it is a ring of tokens with hash chains for n-grams of 2, 4,
8, 16 and 32 tokens, each hash made from two of half the length. So a token costs the same few array cells whatever the
text looks like, the oldest token makes room by being written over, and no chain ever needs mending. A suffix tree of
Python objects costs several times the memory, and cannot forget one end of its text.

Chains are walked over their newest `max_occurrences` entries only. Where a run of tokens is more frequent than that,
the match found may be shorter than the longest, but seldom than half of it: the next longer n-gram has its own chain.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

DEPTH = 64
"""Longest match looked for, in tokens."""

GRAMS = (2, 4, 8, 16, 32)
"""Each twice the one before; the first is the shortest match that counts."""

DOUBT = 3.0
"""How little a short match proves: a single occurrence behind a match of this many tokens is right half the time."""

LEAST_TOKENS = 4 * DEPTH
MAX_OCCURRENCES = 64

NO_TOKEN = -1
"""Stands before each text and behind the last; no token equals it, so no match goes past it."""

_LEFT, _RIGHT, _SHIFT, _MASK = 0x2C1B3C6D, 0x1E3779B1, 13, 0x3FFFFFFF
_LAST_POSITION = 2**31 - 2


class _Chains:
    """Occurrences of the n-grams of one length. A position is that of the token which follows the n-gram."""

    __slots__ = ("half", "heads", "left", "links", "newest")

    def __init__(self, gram: int, size: int) -> None:
        self.half = gram // 2
        self.heads = array("i", bytes(4 * size))
        """Hash -> newest position; 0 is none."""
        self.links = array("i", bytes(4 * size))
        """Ring cell of a position -> the next older position with the same hash."""
        self.left: list[int] = []
        """Hashes of the last half n-grams, oldest first: what new ones are joined to."""
        self.newest: list[int] = []
        """Hash of the n-gram at the very end, which is entered when a token follows it."""

    def grow(self) -> None:
        # A hash has one bit more now: wherever it leads, it finds the chain that it was entered in.
        self.heads.extend(self.heads)
        self.links.extend(array("i", bytes(4 * len(self.links))))

    def enter(self, halves: list[int], end: int) -> list[int]:
        """Enter the n-grams whose right halves are `halves`, the last of them ending before position `end`."""
        row = self.left + halves
        self.left = row[-self.half :]
        grams = [(a * _LEFT + b * _RIGHT) >> _SHIFT & _MASK for a, b in zip(row, row[self.half :], strict=False)]
        if not grams:
            return grams
        known = self.newest + grams
        self.newest = known[-1:]
        heads, links, mask = self.heads, self.links, len(self.heads) - 1
        for position, gram in enumerate(known[:-1], end - len(known) + 1):
            bucket = gram & mask
            links[position & mask] = heads[bucket]
            heads[bucket] = position
        return grams


class SuffixIndex:
    """A sliding window over texts (token ids, 0 and up), indexed by what stands before each position.

    Holds at most `max_tokens` cells, rounded down to a power of two; each text takes one cell beside its tokens. Grows
    by doubling up to that, 44 bytes a cell. Raises ValueError for less than LEAST_TOKENS.
    """

    def __init__(self, max_tokens: int, max_occurrences: int = MAX_OCCURRENCES) -> None:
        if max_tokens < LEAST_TOKENS:
            raise ValueError(f"a suffix index holds at least {LEAST_TOKENS} tokens, not {max_tokens}")
        self.capacity = 1 << (max_tokens.bit_length() - 1)
        self._max_occurrences = max_occurrences
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._size = LEAST_TOKENS
        # The first cells are kept a second time behind the last, so that what stands before a position is one slice.
        self._text = array("i", [NO_TOKEN]) * (self._size + DEPTH)
        self._chains = [_Chains(gram, self._size) for gram in GRAMS]
        self._end = 1

    def __len__(self) -> int:
        """Cells in use."""
        return min(self._end, self.capacity)

    @property
    def end(self) -> int:
        """Position that the next token will get. Positions only grow; they count all texts."""
        return self._end

    @property
    def oldest(self) -> int:
        """The first position that has not been written over."""
        return max(1, self._end - self.capacity + 1)

    def begin_text(self) -> None:
        """What comes next does not continue what is there."""
        # N-grams that reach back over the mark are entered too, under a hash without it. They match nothing.
        self._make_room(1)
        self._end += 1
        self._write(self._end - 1, [NO_TOKEN])

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the current text. Of more tokens than the index can hold the last ones are kept."""
        if not tokens:
            return
        if self._end + len(tokens) > _LAST_POSITION:
            self.clear()
        if len(tokens) > self.capacity - 2:
            tokens = tokens[2 - self.capacity :]
            self.begin_text()
        self._make_room(len(tokens))
        start = self._end
        self._end += len(tokens)
        self._write(start, tokens)
        grams = list(tokens)
        for chains in self._chains:
            grams = chains.enter(grams, self._end)

    def token(self, position: int) -> int:
        """The token at a position from `oldest` to `end`; NO_TOKEN between texts and at the end."""
        return self._text[position & self._size - 1]

    def find(self, token: int, start: int, stop: int) -> list[int]:
        """Positions of `token` from `start` to before `stop`, ascending."""
        text, mask = self._text, self._size - 1
        return [at for at in range(max(start, self.oldest), min(stop, self._end)) if text[at & mask] == token]

    def common_suffix(self, position: int, tail: Sequence[int], limit: int) -> int:
        """How many tokens before `position` equal the end of `tail`, at most `limit` (up to DEPTH)."""
        text, cell = self._text, self._cell_before(position)
        limit = min(limit, len(tail))
        length = 0
        while length < limit and text[cell - length - 1] == tail[-length - 1]:
            length += 1
        return length

    def longest_match(self, tail: Sequence[int]) -> tuple[int, list[int]]:
        """Length of the longest match of `tail`'s end that a token follows, and the positions of those tokens.

        Newest position first. (0, []) when not even the shortest n-gram is known.
        """
        wanted = array("i", tail[-DEPTH:])
        deepest: tuple[int, _Chains, int] | None = None
        gram_hash = wanted[-1] if wanted else 0
        for gram, chains in zip(GRAMS, self._chains, strict=True):
            if gram > len(wanted):
                break
            gram_hash = _join(_fold(wanted[-gram : len(wanted) - chains.half]), gram_hash)
            newest = self._newest(chains, gram_hash, wanted[-gram:])
            if newest == 0:
                break
            deepest = (gram, chains, newest)
        return self._longest(*deepest, wanted) if deepest is not None else (0, [])

    def follow(
        self, length: int, positions: list[int], max_tokens: int, least: float = 0.0
    ) -> tuple[list[int], list[float]]:
        """The most frequent continuation from `positions`, each behind a match of `length` tokens.

        At every token those that went another way drop out; of equally frequent ones the newest wins. Beside each token
        stands the estimated probability that it is right if those before it are. Ends before the probability that
        all of it is right falls below `least`. What follows the index's own end is the guess itself: a loop stays one.
        """
        text, mask, end = self._text, self._size - 1, self._end
        guess: list[int] = []
        confidence: list[float] = []
        all_right = 1.0
        for offset in range(max_tokens):
            if not positions:
                break
            if positions[0] + offset < end:
                followers = [text[position + offset & mask] for position in positions]
            else:
                ends = [position + offset - end for position in positions]
                followers = [text[at + end & mask] if at < 0 else guess[at] for at in ends]
            best, votes = _most_frequent(followers)
            if best == NO_TOKEN:
                break
            # Few occurrences prove little, all the less the shorter the match.
            probability = votes / (len(positions) + DOUBT / (length + offset))
            all_right *= probability
            if all_right < least:
                break
            guess.append(best)
            confidence.append(probability)
            if votes < len(positions):
                positions = [p for p, token in zip(positions, followers, strict=True) if token == best]
        return guess, confidence

    def _newest(self, chains: _Chains, gram_hash: int, wanted: array[int]) -> int:
        """The newest position behind exactly `wanted`, or 0."""
        text, links, mask, oldest = self._text, chains.links, self._size - 1, self.oldest
        length = len(wanted)
        position = chains.heads[gram_hash & mask]
        for _ in range(self._max_occurrences):
            if position < oldest:
                break
            cell = self._cell_before(position)
            if text[cell - length : cell] == wanted:
                return position
            position = links[position & mask]
        return 0

    def _longest(self, length: int, chains: _Chains, position: int, tail: array[int]) -> tuple[int, list[int]]:
        """Walk a chain from `position` on for the longest match of at least `length` tokens."""
        text, links, mask, oldest = self._text, chains.links, self._size - 1, self.oldest
        wanted = tail[-length:]
        positions: list[int] = []
        for _ in range(self._max_occurrences):
            if position < oldest:
                break
            cell = self._cell_before(position)
            if text[cell - length : cell] == wanted:
                longer = length
                while longer < len(tail) and text[cell - longer - 1] == tail[-longer - 1]:
                    longer += 1
                if longer > length:
                    length, wanted, positions = longer, tail[-longer:], []
                positions.append(position)
            position = links[position & mask]
        return length, positions

    def _cell_before(self, position: int) -> int:
        """The cell of a position, such that DEPTH cells stand before it."""
        cell = position & self._size - 1
        return cell if cell >= DEPTH else cell + self._size

    def _write(self, start: int, tokens: Sequence[int]) -> None:
        """Write tokens from position `start` on, which end at the index's end, and the mark behind them."""
        text, size = self._text, self._size
        cell = start & size - 1
        fits = min(len(tokens), size - cell)
        text[cell : cell + fits] = array("i", tokens[:fits])
        text[: len(tokens) - fits] = array("i", tokens[fits:])
        text[self._end & size - 1] = NO_TOKEN
        text[size:] = text[:DEPTH]

    def _make_room(self, count: int) -> None:
        """Double the ring until `count` more cells fit. It has not come round yet, so every position keeps its cell."""
        while self._size < self.capacity and self._end + count >= self._size:
            del self._text[self._size :]
            self._text.extend(array("i", [NO_TOKEN]) * (self._size + DEPTH))
            self._size *= 2
            for chains in self._chains:
                chains.grow()


def _most_frequent(tokens: list[int]) -> tuple[int, int]:
    """The most frequent token, the first of equally frequent ones, and how often it stands there; NO_TOKEN if alone."""
    if tokens.count(tokens[0]) == len(tokens):
        return tokens[0], len(tokens)
    counts: dict[int, int] = {}
    for token in tokens:
        counts[token] = counts.get(token, 0) + 1
    counts.pop(NO_TOKEN, None)
    best = max(counts, key=counts.__getitem__)
    return best, counts[best]


def _join(left: int, right: int) -> int:
    return (left * _LEFT + right * _RIGHT) >> _SHIFT & _MASK


def _fold(tokens: array[int]) -> int:
    """The hash of an n-gram, made of its halves' hashes like those in the chains; a token is its own."""
    row = list(tokens)
    while len(row) > 1:
        row = [(a * _LEFT + b * _RIGHT) >> _SHIFT & _MASK for a, b in zip(row[::2], row[1::2], strict=True)]
    return row[0]
