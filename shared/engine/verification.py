"""Which drafted tokens may be tried, and how many of them the target's own choices confirm. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def usable_drafts(token_ids: Sequence[int], start: int, proposed: Sequence[int], limit: int) -> list[int]:
    """The part of a proposal that continues `token_ids`, at most `limit` tokens.

    `proposed[0]` stands at absolute position `start`. Where the proposal overlaps the tokens known it must agree with
    them; a proposal that starts beyond their end, or disagrees, gives nothing.
    """
    known = len(token_ids) - start
    if start < 0 or known < 0 or list(proposed[:known]) != list(token_ids[start : start + len(proposed)]):
        return []
    return list(proposed[known : known + max(limit, 0)])


def extended(present: Sequence[int], offset: int, proposed: Sequence[int]) -> list[int] | None:
    """What is proposed behind the tokens known once `proposed` has come, whose first token stands `offset` behind them.

    `present` is what was proposed before. A run that goes on from it extends it, one that disagrees replaces it from
    there. None when nothing changes: it says less of the same, or begins beyond the end.
    """
    if offset > len(present):
        return None
    joined = [*present[:offset], *proposed]
    return None if list(present[: len(joined)]) == joined else joined


def verify(
    drafts: Sequence[int], choose: Callable[[int], int], ended: Callable[[], bool] = lambda: False
) -> tuple[list[int], int]:
    """Return (the tokens that the target generates, how many drafts were right).

    `choose(i)` is the target's own choice after the first `i` drafted tokens, asked in order and only while all
    drafts before it were right. Drafts are kept while they equal that choice; the first differing choice, one that
    `ended` the sequence, or the one after the last draft, ends the run. So the result is what undrafted decoding gives,
    one token at a time, and `choose` may remember what it chose.
    """
    chosen: list[int] = []
    for index, draft in enumerate(drafts):
        token = choose(index)
        chosen.append(token)
        if token != draft:
            return chosen, index
        if ended():
            return chosen, index + 1
    chosen.append(choose(len(drafts)))
    return chosen, len(drafts)
