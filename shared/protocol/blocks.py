"""KV blocks as other processes see them: the layout they share, where a block lies, the manifest of a sequence."""

from __future__ import annotations

import hashlib

import msgspec


class KVLayout(msgspec.Struct, frozen=True):
    """All that two workers must agree on before one may use the other's KV blocks.

    A block is one contiguous array `[2 (K, V), layers, block_tokens, kv_heads, head_dim]` of `kv_dtype`.
    """

    model: str
    fingerprint: str
    """Digest of config and weights."""
    kv_dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    rope: str
    """Canonical JSON of the rotary parameters; empty for models without."""
    numerics: str
    """Names kernels, precision and device class, for example `cpu/fp16-packed`."""
    tensor_parallel: int = 1

    @property
    def layout_id(self) -> str:
        """16 hex digits, equal only for layouts that agree in every field."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]

    @property
    def itemsize(self) -> int:
        return {"float32": 4, "float16": 2, "bfloat16": 2}[self.kv_dtype]

    @property
    def block_bytes(self) -> int:
        return 2 * self.layers * self.block_tokens * self.kv_heads * self.head_dim * self.itemsize


class Place(msgspec.Struct, frozen=True, order=True):
    """Where a block can be fetched: a KV store (or any worker that holds blocks) and its address."""

    store: str
    host: str
    port: int
    transport: str


class BlockRef(msgspec.Struct, frozen=True):
    """One block of a manifest. `n_tokens` is below the layout's block length only for the last, partial block.

    `checksum` is xxh3-64 over the whole block, made where the block was computed.
    """

    key: bytes
    n_tokens: int
    n_bytes: int
    checksum: int
    places: list[Place]


class Manifest(msgspec.Struct, frozen=True):
    """The KV cache of a sequence's first `n_tokens` tokens, block by block in order."""

    layout_id: str
    n_tokens: int
    blocks: list[BlockRef]
