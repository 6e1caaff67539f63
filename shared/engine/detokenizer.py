"""Turns output tokens into visible text, token by token: whole characters only, stop strings found and never shown.

What is visible after n tokens is a function of those tokens alone, so a successor that replays them goes on exactly.
"""

from __future__ import annotations

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"

_CHARACTER_TOKENS = 4
"""A character takes at most four tokens (one for each byte); bytes that are older cannot become part of one."""

_MAX_HELD_TOKENS = 32
"""Undecodable tokens held before the oldest are given up as U+FFFD, so that garbage does not cost quadratic time."""


class Detokenizer:
    """`push` each output token in order; `finish` when the sequence ends for another reason than a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: list[str], prompt_tail: list[int], min_tokens: int = 0) -> None:
        """`prompt_tail`: the prompt's last few ids, so that a leading blank is decoded as inside a text.

        A stop string that the first `min_tokens` tokens complete is text like any other.
        """
        self._tokenizer = tokenizer
        self._stop = [s for s in stop if s]
        tail = list(prompt_tail)
        if tail and tokenizer.decode(tail, skip_special_tokens=True).endswith(_REPLACEMENT):
            tail = []  # the prompt ends within a character, which belongs to the prompt
        self._ids = tail
        """The window that is decoded: ids that are text already, kept as context, then ids that are not yet."""
        self._read = len(tail)
        """How many ids of the window are text already."""
        self._held = ""
        """Text that may still grow into a stop string."""
        self._min_tokens = min_tokens
        self._pushed = 0
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Returns the text that became visible. Sets `stopped` when a stop string was completed."""
        self._ids.append(token_id)
        self._pushed += 1
        before, after = self._decode(0, self._read), self._decode(0)
        if after.endswith(_REPLACEMENT):
            return self._release(self._give_up_oldest(before, after))
        if len(after) <= len(before):
            return ""
        self._move_window(self._read, len(self._ids))
        return self._release(after[len(before) :])

    def finish(self) -> str:
        """Returns everything still held back, incomplete characters as U+FFFD. Nothing after a stop string."""
        if self.stopped:
            return ""
        before, after = self._decode(0, self._read), self._decode(0)
        self._move_window(self._read, len(self._ids))
        text = self._release(after[len(before) :])
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _decode(self, start: int, end: int | None = None) -> str:
        ids = self._ids[start:end]
        return self._tokenizer.decode(ids, skip_special_tokens=True) if ids else ""

    def _move_window(self, start: int, read: int) -> None:
        """Forget the ids before `start`; those before `read` are text now."""
        del self._ids[:start]
        self._read = read - start

    def _give_up_oldest(self, before: str, after: str) -> str:
        """The text of old tokens that make no character, once too many are held; cut where it splits none."""
        if len(self._ids) - self._read <= _MAX_HELD_TOKENS:
            return ""
        for cut in range(len(self._ids) - _CHARACTER_TOKENS, self._read, -1):
            settled = self._decode(0, cut)
            if settled + self._decode(cut) == after:
                self._move_window(cut, cut)
                return settled[len(before) :]
        return ""

    def _release(self, new_text: str) -> str:
        """Cut at the first stop string, and hold back a tail that may become one."""
        if not new_text:
            return ""
        text = self._held + new_text
        # A match must end in the new text: one that lies in what was held was passed over before `min_tokens`.
        found = [at for at in (text.find(s, max(0, len(self._held) + 1 - len(s))) for s in self._stop) if at >= 0]
        if found and self._pushed > self._min_tokens:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        hold = max((_overlap(text, s) for s in self._stop), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0
