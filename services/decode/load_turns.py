"""Answers to one prompt arrive together: one of them loads its blocks, the others then find them in the cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.protocol.blocks import Manifest


class LoadTurns:
    """Who is loading which prompt now. A turn that ends without success sends the others on to load by themselves."""

    def __init__(self) -> None:
        self._loading: dict[bytes, asyncio.Event] = {}

    async def take(self, manifest: Manifest, block_tokens: int) -> Callable[[], None]:
        """Wait while the same full blocks are being loaded; then call what is returned once they are, or never will."""
        full = manifest.n_tokens // block_tokens
        if not full:
            return lambda: None
        key = manifest.blocks[full - 1].key
        loading = self._loading.get(key)
        if loading is not None:
            await loading.wait()
            return lambda: None
        done = self._loading[key] = asyncio.Event()

        def end() -> None:
            if self._loading.get(key) is done:
                del self._loading[key]
            done.set()

        return end
