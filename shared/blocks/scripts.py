"""The index's Lua scripts, each one atomic step. They use only what Redis 7.0 and Valkey both have.

They build names of heartbeat keys from the fields that they read, so the index belongs on a single server or replica
set, not on a Redis cluster.
"""

from __future__ import annotations

import hashlib
from typing import Final, NamedTuple

STORE_PREFIX: Final = "hr:kv:store:"


class Script(NamedTuple):
    source: str
    sha: str


def _script(source: str) -> Script:
    return Script(source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


# KEYS: blocks. Answers {per block: flat fields and values, flat names and heartbeats of the stores named there}.
LOOKUP: Final = _script(
    """
local blocks, live, seen = {}, {}, {}
for i, key in ipairs(KEYS) do
  local fields = redis.call('HGETALL', key)
  blocks[i] = fields
  for j = 1, #fields, 2 do
    local store = fields[j]
    if not seen[store] then
      seen[store] = true
      local heartbeat = redis.call('GET', '"""
    + STORE_PREFIX
    + """' .. store)
      if heartbeat then
        live[#live + 1] = store
        live[#live + 1] = heartbeat
      end
    end
  end
end
return {blocks, live}
"""
)

# KEYS: blocks. ARGV: store, time to live in ms, one holding per block.
RECORD: Final = _script(
    """
for i, key in ipairs(KEYS) do
  redis.call('HSET', key, ARGV[1], ARGV[i + 2])
  redis.call('PEXPIRE', key, ARGV[2])
end
return #KEYS
"""
)

# KEYS: blocks. ARGV: store. A hash without fields is gone.
FORGET: Final = _script(
    """
for _, key in ipairs(KEYS) do
  redis.call('HDEL', key, ARGV[1])
end
return #KEYS
"""
)

# KEYS: the store's heartbeat. ARGV: heartbeat, time to live in ms. Answers whether the same heartbeat was there.
BEAT: Final = _script(
    """
local known = redis.call('GET', KEYS[1]) == ARGV[1]
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
if known then return 1 end
return 0
"""
)
