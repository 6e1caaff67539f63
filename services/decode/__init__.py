"""Decode: KV blocks become tokens, in a running batch, with verification of drafted tokens."""
