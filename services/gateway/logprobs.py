"""Log probabilities in OpenAI's two forms: a list of tokens for chats, four parallel lists for completions.

A token that is part of a character has no text of its own. Its `token` shows the bytes instead, as OpenAI does:
`\\xe2\\x9c` in chats, `bytes:\\xe2\\x9c` in completions (where tokens are keys and must not collide).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from shared.models import TokenBytes
from shared.protocol.records import Accepted, Api, TokenLogprobs, Tokens


class LogprobWriter:
    """For one choice: `body` of each of its `Tokens` records, in order, since completions tell each token's place.

    The place (`text_offset`) counts the whole characters that the tokens before it make up, special tokens none.
    """

    def __init__(self, accepted: Accepted, tokens: TokenBytes) -> None:
        self._wanted = accepted.logprobs is not None
        self._api: Api = accepted.api
        self._tokens = tokens
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def body(self, record: Tokens) -> dict[str, Any] | None:
        """The `logprobs` of a choice, of these tokens only. None if they were not asked for or the record has none."""
        if not self._wanted or not record.logprobs:
            return None
        pairs = list(zip(record.ids, record.logprobs, strict=False))
        if self._api == "chat":
            return {"content": [self._chat_token(*pair) for pair in pairs], "refusal": None}
        return {
            "tokens": [self._completion_name(token_id) for token_id, _ in pairs],
            "token_logprobs": [found.logprob for _, found in pairs],
            "top_logprobs": [self._completion_top(*pair) for pair in pairs],
            "text_offset": [self._advance(token_id) for token_id, _ in pairs],
        }

    def _chat_token(self, token_id: int, found: TokenLogprobs) -> dict[str, Any]:
        top = [self._chat_entry(*entry) for entry in found.top]
        return {**self._chat_entry(token_id, found.logprob), "top_logprobs": top}

    def _chat_entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokens.bytes_of(token_id)
        if data is None:
            return {"token": self._tokens.name_of(token_id), "logprob": logprob, "bytes": None}
        return {"token": data.decode("utf-8", "backslashreplace"), "logprob": logprob, "bytes": list(data)}

    def _completion_name(self, token_id: int) -> str:
        data = self._tokens.bytes_of(token_id)
        if data is None:
            return self._tokens.name_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _completion_top(self, token_id: int, found: TokenLogprobs) -> dict[str, float]:
        """The alternatives by name, and always the chosen token, as OpenAI has it: one more than asked for at most."""
        top: dict[str, float] = {}
        for other, logprob in (*found.top, (token_id, found.logprob)):
            top.setdefault(self._completion_name(other), logprob)
        return top

    def _advance(self, token_id: int) -> int:
        before = self._offset
        self._offset += len(self._characters.decode(self._tokens.bytes_of(token_id) or b""))
        return before


def joined(bodies: Iterable[dict[str, Any] | None]) -> dict[str, Any] | None:
    """The bodies of several records as one. None when there is none."""
    whole: dict[str, Any] | None = None
    for body in bodies:
        if body is None:
            continue
        if whole is None:
            whole = {name: None if part is None else [] for name, part in body.items()}
        for name, part in body.items():
            if part is not None:
                whole[name].extend(part)
    return whole
