"""UCX's own log, kept in memory: it is the only place where UCX says which transports an endpoint really uses.

Its warnings and errors go to our log; the rest is dropped.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re

import structlog

# `... ucp_worker.c:1984 UCX  INFO    ucp_context_0 intra-node cfg#0 tag(posix/memory cma/memory)  rma(...) ...`
_LANES = re.compile(r"(?:intra|inter|self)\S* cfg#\d+ .*?tag\(([^)]*)\)")
_FAULT = re.compile(r"UCX\s+(WARN|ERROR|FATAL)\s+(.*)")
_MAX_BYTES = 1 << 20

log = structlog.get_logger(__name__)


class UcxLog:
    """Owns the memory file that UCX writes to. Not read by anybody else."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("ucx-log")
        self._offset = 0
        self.lanes: list[tuple[str, ...]] = []
        """Transports of each kind of endpoint made so far, newest last, without doubles: `("posix", "cma")`."""

    @property
    def descriptor(self) -> int:
        return self._descriptor

    def refresh(self) -> None:
        """Read what is new. Cheap; called after a connection was made and when somebody asks for the status."""
        ctypes.CDLL(None).fflush(None)  # UCX writes through C's buffered streams
        fresh = os.pread(self._descriptor, _MAX_BYTES, self._offset)
        complete = fresh[: fresh.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.decode(errors="replace").splitlines():
            self._take(line)
        if self._offset >= _MAX_BYTES:
            # UCX goes on writing at its own offset; the file becomes sparse and its memory is given back.
            os.ftruncate(self._descriptor, 0)

    def _take(self, line: str) -> None:
        if fault := _FAULT.search(line):
            if "UNUSED_ENV" in fault[2] or "unused env" in fault[2]:
                return  # variables of ours, or ucxx's, for parts that this machine's UCX does not load
            log.warning("ucx_complains", level=fault[1].lower(), message=fault[2])
        elif lanes := _LANES.search(line):
            names = tuple(dict.fromkeys(lane.split("/")[0] for lane in lanes[1].split()))
            if names in self.lanes:
                self.lanes.remove(names)
            self.lanes.append(names)


@functools.cache
def process_log() -> UcxLog:
    """The one of this process: UCX opens its log when it is loaded, and keeps it through every later start."""
    return UcxLog()
