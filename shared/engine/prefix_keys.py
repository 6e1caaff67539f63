"""Keys of full KV blocks: equal keys mean equal salt and equal token ids from the first token to the block's end."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

_KEY_BYTES = 32
"""Of BLAKE2b: nobody finds two texts with one key, so a hit needs no comparison of tokens."""


def extend_keys(keys: list[bytes], salt: str, token_ids: Sequence[int], block_tokens: int, count: int) -> None:
    """Append to `keys`, the keys of the first blocks of `token_ids`, until there are `count`. About 2 us a block.

    Each key hashes its parent's key and the block's own ids; the first parent hashes the salt.
    """
    for index in range(len(keys), count):
        parent = keys[-1] if keys else hashlib.blake2b(salt.encode(), digest_size=_KEY_BYTES).digest()
        own = array("q", token_ids[index * block_tokens : (index + 1) * block_tokens]).tobytes()
        keys.append(hashlib.blake2b(parent + own, digest_size=_KEY_BYTES, person=b"prefix-block").digest())
