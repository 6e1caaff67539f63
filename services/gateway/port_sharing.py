"""One port for two gateways of a stack, while one of them restarts and the other stands in for it.

The kernel hands a new connection to one of the sockets that share a port (SO_REUSEPORT, socket(7)). It is told to
prefer the newest, so that the older gateway's queue of connections is empty when that one stops, and nobody is cut off.
Where the kernel does not take that advice it spreads them, and a client that connects in the very moment of a stop
may be refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from pathlib import Path
from typing import Final

_STACK_ID: Final = "HEADRACE_STACK_ID"
"""Set by `headrace up` for all processes of a stack."""
_LISTEN: Final = "0A"
_SO_ATTACH_REUSEPORT_CBPF: Final = 51


def may_share(host: str, port: int) -> bool:
    """Whether this gateway belongs to a stack and all that listen on the port, if any do, belong to it too."""
    stack_id = os.environ.get(_STACK_ID, "")
    if not stack_id or not hasattr(socket, "SO_REUSEPORT"):
        return False
    if _free(host, port):
        return True
    listening = _listening_sockets(port)
    return bool(listening) and listening <= _sockets_of_stack(stack_id)


def share(listener: socket.socket) -> None:
    """Before it is bound."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def prefer_newest(listener: socket.socket) -> None:
    """New connections go to the second of two sockets that share a port; to the only one when there is one.

    Only once it listens: a socket that has a program of its own may not join others on a port.
    """
    # A classic BPF program of one instruction, `ret #1`: the index of the socket, in the order in which they came.
    instruction = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 1))
    program = struct.pack("HP", 1, ctypes.addressof(instruction))
    with contextlib.suppress(OSError):  # not shared, or not Linux
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, program)


def _free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _listening_sockets(port: int) -> set[str]:
    """Inodes of the sockets that listen on a port, whatever the address; see proc(5). None where there is no /proc."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(fields[9])
    return found


def _sockets_of_stack(stack_id: str) -> set[str]:
    """Inodes of all sockets of the processes that carry this stack's id in their environment."""
    mark = f"{_STACK_ID}={stack_id}".encode()
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
            if mark in (process / "environ").read_bytes().split(b"\0"):
                targets = [_target(descriptor) for descriptor in (process / "fd").iterdir()]
                found |= {target[len("socket:[") : -1] for target in targets if target.startswith("socket:[")}
    return found


def _target(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except OSError:
        return ""
