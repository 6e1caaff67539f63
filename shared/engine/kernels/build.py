"""Compiles the CPU kernels with the C compiler in the `ziglang` package, so that no compiler need be installed.

Run at installation (setup.py) and in image builds: `python shared/engine/kernels/build.py OUTPUT_FOLDER`. Needs nothing
of Headrace's at import.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import zlib
from pathlib import Path

SOURCE = Path(__file__).with_name("cpu.c")

_TARGETS = {"linux": "{machine}-linux-gnu.2.17", "darwin": "{machine}-macos"}
_FLAGS = ["-std=c11", "-O3", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fno-math-errno"]
# Contraction would fuse other operations in one variant than in the next; the bits shall be the same in all.
_FLAGS += ["-ffp-contract=off"]
_TIMEOUT_S = 600


def machine() -> str:
    """This processor's family, by the name that compilers use."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def variants() -> dict[str, list[str]]:
    """Library name -> compiler options, for each level of this machine's processor family, best first."""
    if machine() == "x86_64":
        return {f"cpu_{level}.so": [f"-mcpu=x86_64_{level}"] for level in ("v4", "v3")}
    return {"cpu_base.so": []}


def source_number() -> int:
    """Tells whether a library was made from the source as it is now."""
    return zlib.crc32(SOURCE.read_bytes())


def compile_variant(library: str, output: Path) -> None:
    """Write `library` to the path `output`. Raises RuntimeError with the compiler's words.

    An older file there is replaced, not overwritten: a process may be running in it.
    """
    target = _TARGETS.get(sys.platform)
    if target is None:
        raise RuntimeError(f"the CPU kernels are not built on {sys.platform}; use Linux or macOS")
    output.parent.mkdir(parents=True, exist_ok=True)
    fresh = output.with_suffix(".new")
    command = [sys.executable, "-m", "ziglang", "cc", *_FLAGS, "-target", target.format(machine=machine())]
    command += [*variants()[library], f"-DHR_SOURCE={source_number()}u", "-o", str(fresh), str(SOURCE)]
    done = subprocess.run(  # noqa: S603 (its parts are constants and paths)
        command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"compiling {SOURCE.name} failed: {done.stderr.strip()[-2000:]}")
    fresh.replace(output)


if __name__ == "__main__":
    for name in variants():
        compile_variant(name, Path(sys.argv[1]) / name)
