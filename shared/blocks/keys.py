"""Keys of KV blocks: a chained hash, so equal keys mean equal layout, salt and token ids from the first token on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shared.protocol.kv import KEY_BYTES


class BlockKey(NamedTuple):
    """`n_tokens` is below the block length only for the last, partial block, whose key differs from the full one's."""

    key: bytes
    n_tokens: int


def block_keys(layout_id: str, salt: str, token_ids: Sequence[int], block_tokens: int) -> list[BlockKey]:
    """The keys of all blocks that hold `token_ids`, in order. Costs a few us a block.

    Each key hashes its parent's key and its own run of token ids; the first parent hashes layout and salt, each with
    its length. So tenants with different salts never share a block, and a partial block is known by its shorter run.
    Raises ValueError for ids outside 0 .. 2**32-1 and for a block length below 1.
    """
    if block_tokens < 1:
        raise ValueError(f"a block holds at least one token, not {block_tokens}")
    try:
        packed = np.asarray(token_ids, dtype=np.int64)
    except OverflowError as error:
        raise ValueError("token ids must fit into 32 bits") from error
    if packed.size and (packed.min() < 0 or packed.max() > 0xFFFFFFFF):
        raise ValueError("token ids must be from 0 to 2**32-1")
    raw = packed.astype("<u4").tobytes()
    parent = _root(layout_id, salt)
    keys: list[BlockKey] = []
    for start in range(0, len(raw), 4 * block_tokens):
        run = raw[start : start + 4 * block_tokens]
        parent = hashlib.blake2b(parent + run, digest_size=KEY_BYTES, person=b"headrace-block").digest()
        keys.append(BlockKey(parent, len(run) // 4))
    return keys


def _root(layout_id: str, salt: str) -> bytes:
    hasher = hashlib.blake2b(digest_size=KEY_BYTES, person=b"headrace-root")
    for part in (layout_id.encode(), salt.encode()):
        hasher.update(len(part).to_bytes(8, "little") + part)
    return hasher.digest()
