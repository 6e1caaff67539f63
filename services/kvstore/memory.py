"""How much memory this process may take, so that a pool that cannot work is refused at start."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USE = Path("/sys/fs/cgroup/memory.current")


def available_bytes() -> int | None:
    """Memory of the machine that is free or can be freed, or what is left to the container; None where unknown."""
    found = [limit for limit in (_machine(), _container()) if limit is not None]
    return min(found) if found else None


def _machine() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _container() -> int | None:
    try:
        limit, use = _CGROUP_LIMIT.read_text().strip(), _CGROUP_USE.read_text().strip()
    except OSError:
        return None
    return None if limit == "max" else int(limit) - int(use)
