"""KV blocks outside of an engine: keys, checksums, the index, placement, and the client that workers use."""

from shared.blocks.checksum import checksum, checksums, receive_hashed
from shared.blocks.client import KVClient
from shared.blocks.index import BlockIndex, Heartbeat, Holding, IndexEntry
from shared.blocks.keys import BlockKey, block_keys
from shared.blocks.rendezvous import ranked

__all__ = [
    "BlockIndex",
    "BlockKey",
    "Heartbeat",
    "Holding",
    "IndexEntry",
    "KVClient",
    "block_keys",
    "checksum",
    "checksums",
    "ranked",
    "receive_hashed",
]
