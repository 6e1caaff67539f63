"""Prefill: a prompt becomes KV blocks and the first token."""
