"""Turns output tokens into visible text, token by token: whole characters only, stop strings found and never shown.

What is visible after n tokens is a function of those tokens alone, so a successor that replays them goes on exactly.
"""

from __future__ import annotations

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """`push` each output token in order; `finish` when the sequence ends for another reason than a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: list[str], prompt_tail: list[int]) -> None:
        """`prompt_tail`: the prompt's last few ids, so that a leading blank is decoded as inside a text."""
        self._tokenizer = tokenizer
        self._stop = [s for s in stop if s]
        tail = list(prompt_tail)
        if tail and tokenizer.decode(tail, skip_special_tokens=True).endswith(_REPLACEMENT):
            tail = []  # the prompt ends within a character, which belongs to the prompt
        self._ids = tail
        self._shown = 0  # ids before this one began the current window and are already text
        self._read = len(self._ids)  # ids before this one are already text
        self._held = ""  # decoded, but it may grow into a stop string
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Returns the text that became visible. Sets `stopped` when a stop string was completed."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._shown : self._read])
        after = self._decode(self._ids[self._shown :])
        if len(after) <= len(before) or after.endswith(_REPLACEMENT):
            return ""
        self._shown, self._read = self._read, len(self._ids)
        return self._release(after[len(before) :])

    def finish(self) -> str:
        """Returns everything still held back, incomplete characters as U+FFFD. Nothing after a stop string."""
        if self.stopped:
            return ""
        before = self._decode(self._ids[self._shown : self._read])
        after = self._decode(self._ids[self._shown :])
        self._shown, self._read = self._read, len(self._ids)
        text = self._release(after[len(before) :])
        if self.stopped:
            return text
        text, self._held = text + self._held, ""
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True) if ids else ""

    def _release(self, new_text: str) -> str:
        """Cut at the first stop string, and hold back a tail that may become one."""
        text = self._held + new_text
        found = [at for at in (text.find(s) for s in self._stop) if at >= 0]
        if found:
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
