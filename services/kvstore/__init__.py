"""The KV store: keeps KV blocks in memory between prefill and decode, leases them, evicts the least recently used."""
