"""The bytes that a single token stands for, which may be part of a character only. Text is the detokenizer's matter."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final

from tokenizers import Tokenizer

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BLANK: Final = "\u2581"
"""SentencePiece's mark for a blank."""


class TokenBytes:
    """Each token's own bytes, as one read of a tokenizer's vocabulary gives them.

    Byte-level vocabularies (GPT-2's and its heirs') spell every byte as a printable character; SentencePiece's spell
    text, with a mark for blanks and `<0x0A>` for lone bytes. Any other vocabulary counts as plain text.
    """

    def __init__(self, raw: Tokenizer) -> None:
        self._raw = raw
        self._added = raw.get_added_tokens_decoder()
        self._spelled = _speller(raw)
        self._known: dict[int, bytes | None] = {}
        """Grows up to the size of the vocabulary."""

    def bytes_of(self, token_id: int) -> bytes | None:
        """None for special tokens, which are no text, and for ids that the tokenizer does not have."""
        try:
            return self._known[token_id]
        except KeyError:
            found = self._known[token_id] = self._find(token_id)
            return found

    def name_of(self, token_id: int) -> str:
        """What to call a token without bytes: `<|im_end|>`, or `token_id:7` for an id that has no token."""
        return self._raw.id_to_token(token_id) or f"token_id:{token_id}"

    def _find(self, token_id: int) -> bytes | None:
        if (added := self._added.get(token_id)) is not None:
            return None if added.special else str(added.content).encode()
        token = self._raw.id_to_token(token_id)
        return None if token is None else self._spelled(token)


def _speller(raw: Tokenizer) -> Callable[[str], bytes]:
    """How this vocabulary spells bytes, told by the decoder that the tokenizer's file names."""
    decoder: dict[str, Any] = json.loads(raw.decoder.__getstate__()) if raw.decoder is not None else {}
    steps = decoder.get("decoders", [decoder])
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return _from_byte_level
    if kinds & {"ByteFallback", "Metaspace"}:
        return _from_sentencepiece
    return str.encode


def _from_byte_level(token: str) -> bytes:
    return b"".join(_BYTE_OF[c] if c in _BYTE_OF else c.encode() for c in token)


def _from_sentencepiece(token: str) -> bytes:
    if (lone := _BYTE_TOKEN.fullmatch(token)) is not None:
        return bytes([int(lone[1], 16)])
    return token.replace(_BLANK, " ").encode()


def _byte_level_alphabet() -> dict[str, bytes]:
    """GPT-2's table: printable Latin-1 characters stand for themselves, the other bytes for what follows U+00FF."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    table = {chr(byte): bytes([byte]) for byte in printable}
    return table | {chr(0x100 + n): bytes([byte]) for n, byte in enumerate(others)}


_BYTE_OF: Final = _byte_level_alphabet()
