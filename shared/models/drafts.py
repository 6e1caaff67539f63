"""Draft models that come with this package: their trained layers, packed; all else is the target's and taken from it.

`headrace distill --pack` writes such a file. Building the model directory from it takes a second and no torch.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.models.errors import ModelUnusable

PACK_FORMAT: Final = "headrace-draft-1"
SCALES: Final = ".scales"
"""Ends the name of the scales, one a row, of an 8-bit matrix of the same name."""

TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""What a draft has in common with its target, file for file: the same tokens, and the same ends of a text."""

HEAD_TOKENS: Final = "head_tokens.json"
"""In a draft's directory: the ids, as a JSON list, of the tokens that its head knows. Without it: all."""

FOLLOWERS: Final = "followers.safetensors"
"""In a draft's directory: which tokens usually follow which. Without it the draft model guesses alone."""

PACKED_FOLLOWERS: Final = "followers/"
"""Begins the names of its arrays in a packed draft."""

PACKED_HEAD: Final = "head_tokens"
"""The same in a packed draft."""

_Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]

_PACKED = Path(__file__).with_name("packed_drafts")


@dataclass(frozen=True)
class BuiltinDraft:
    """A draft for the built-in model `target`."""

    name: str
    target: str
    needed_bytes: int
    licence: str

    @property
    def packed(self) -> Path:
        return _PACKED / f"{self.name}.safetensors"

    @property
    def digest(self) -> str:
        """12 hex digits. Raises ModelUnusable where the file was not installed."""
        try:
            return hashlib.sha256(self.packed.read_bytes()).hexdigest()[:12]
        except OSError as error:
            raise ModelUnusable(f"draft {self.name} is missing from this installation ({self.packed})") from error


BUILTIN_DRAFTS: Final = {
    draft.name: draft
    for draft in (
        BuiltinDraft(
            name="smollm2-135m-instruct-draft",
            target="smollm2-135m-instruct",
            needed_bytes=150_000_000,
            licence="Apache-2.0",
        ),
    )
}


def draft_of(model: str) -> str:
    """Name of the draft that comes with this package for a built-in model; empty where there is none, or no file."""
    return next((d.name for d in BUILTIN_DRAFTS.values() if d.target == model and d.packed.is_file()), "")


def read_head_tokens(directory: Path) -> list[int]:
    """Empty where the head knows all tokens. Raises ModelUnusable."""
    path = directory / HEAD_TOKENS
    if not path.is_file():
        return []
    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[_Token])
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelUnusable(f"{path} cannot be read: {error}") from error
    if not found:
        raise ModelUnusable(f"{path} names no token")
    return found


class PackHeader(msgspec.Struct, frozen=True):
    """In the metadata of a packed draft: `config` is the model's configuration, `shared` the names of the weights that
    the target gives, `report` how the draft was made and what it is worth."""

    format: str
    target: str
    config: dict[str, Any]
    shared: list[str]
    report: dict[str, Any]


def build_draft(packed: Path, target: Path, directory: Path) -> None:
    """Fill the existing `directory` with what `packed` makes of the model in `target`. Raises ModelUnusable."""
    try:
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415 (not where only gateways are installed)
        from safetensors.numpy import save_file  # noqa: PLC0415
    except ImportError as error:
        raise ModelUnusable(f"{packed.stem} needs safetensors; install headrace[draft]") from error
    try:
        with safe_open(packed, framework="np") as file:
            header = msgspec.json.decode(file.metadata()["headrace"], type=PackHeader)
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        if header.format != PACK_FORMAT:
            raise ModelUnusable(f"{packed.name} has format {header.format!r}; this version reads {PACK_FORMAT!r}")
        if (head_tokens := stored.pop(PACKED_HEAD, None)) is not None:
            (directory / HEAD_TOKENS).write_bytes(msgspec.json.encode(head_tokens.tolist()))
        names = [name for name in stored if name.startswith(PACKED_FOLLOWERS)]
        if names:
            arrays = {name.removeprefix(PACKED_FOLLOWERS): stored.pop(name) for name in names}
            save_file(arrays, directory / FOLLOWERS)
        weights = {name: _whole(stored, name) for name in stored if not name.endswith(SCALES)}
        missing = set(header.shared)
        for path in sorted(target.glob("*.safetensors")):
            with safe_open(path, framework="np") as file:
                for name in missing & set(file.keys()):
                    weights[name] = file.get_tensor(name).astype(np.float16)
        missing -= set(weights)
        if missing:
            raise ModelUnusable(f"{target} has no {', '.join(sorted(missing))}, which {packed.name} needs of it")
        save_file(weights, directory / "model.safetensors", {"format": "pt"})
    except (SafetensorError, KeyError, TypeError, msgspec.MsgspecError) as error:
        raise ModelUnusable(f"{packed.name} cannot be read: {error}") from error
    for name in TOKENIZER_FILES:
        if (target / name).is_file():
            shutil.copyfile(target / name, directory / name)
    (directory / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(header.config), indent=2))
    (directory / "distill.json").write_bytes(msgspec.json.format(msgspec.json.encode(header.report), indent=2))


def _whole(stored: dict[str, NDArray[Any]], name: str) -> NDArray[np.float16]:
    value = stored[name].astype(np.float32)
    scales = stored.get(name + SCALES)
    return (value if scales is None else value * scales[:, None]).astype(np.float16)
