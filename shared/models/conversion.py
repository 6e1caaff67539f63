"""Turns a GGUF file into a safetensors directory, in a child process of its own (see `gguf_worker`).

The child keeps torch out of the caller, and when memory runs out it is the child that dies.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from shared.models.errors import ModelUnusable
from shared.models.progress import Progress

_NEEDED = ("torch", "transformers", "gguf", "accelerate")
_PROGRESS = "progress "
_FAILED = "failed "


def convert_gguf(source: Path, target: Path, progress: Progress) -> None:
    """Fill the existing directory `target` with config, fp32 weights, tokenizer and chat template of `source`.

    Raises:
        ModelUnusable: packages are missing, the file is not a usable model, or memory ran out.
    """
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise ModelUnusable(
            f"{source.name} is not converted yet and {', '.join(missing)} are not installed here; "
            "run `headrace model fetch` where headrace[engine] is installed, with the same HEADRACE_CACHE_DIR"
        )
    command = [sys.executable, "-m", "shared.models.gguf_worker", str(source), str(target)]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(  # noqa: S603 (fixed arguments)
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **threads, **offline},
    ) as child:
        try:
            failure = _follow(child, progress)
        finally:
            if child.poll() is None:
                child.kill()
    if child.returncode != 0:
        raise ModelUnusable(f"{source.name} cannot be converted: {failure or _death(child.returncode)}")


def _follow(child: subprocess.Popen[str], progress: Progress) -> str:
    """Relay the child's progress until it ends; returns the reason it gave for failing, if any."""
    failure = ""
    assert child.stdout is not None  # noqa: S101 (stdout=PIPE)
    for line in child.stdout:
        if line.startswith(_PROGRESS):
            done, total = line.removeprefix(_PROGRESS).split()
            progress("convert", int(done), int(total))
        elif line.startswith(_FAILED):
            failure = line.removeprefix(_FAILED).strip()
    child.wait()
    return failure


def _death(returncode: int) -> str:
    if returncode < 0:
        return f"the converter was killed by signal {-returncode}, most likely for lack of memory"
    return f"the converter ended with code {returncode}"
