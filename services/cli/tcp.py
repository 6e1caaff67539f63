"""Whether somebody accepts connections at an address."""

from __future__ import annotations

import socket


def accepts(host: str, port: int, timeout_s: float = 0.5) -> bool:
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False
