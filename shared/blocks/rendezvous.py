"""Which store gets a block: rendezvous hashing, so a store that comes or goes moves only its share of the blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from shared.protocol.blocks import Place


def ranked(key: bytes, places: Sequence[Place]) -> list[Place]:
    """All places, the one that the block belongs to first. Depends on the stores' names only, not on their order."""
    return sorted(places, key=lambda place: (_weight(key, place.store), place.store), reverse=True)


def _weight(key: bytes, store: str) -> bytes:
    return hashlib.blake2b(store.encode(), digest_size=8, key=key).digest()
