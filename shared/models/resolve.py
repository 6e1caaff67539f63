"""From the name in `HEADRACE_MODEL` to a directory that the engine and the tokenizer can load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shared.models.builtin import BUILTIN_MODELS, BuiltinModel, fetch_builtin
from shared.models.cache import (
    exclusive,
    models_root,
    read_entry,
    require_space,
    seal_entry,
    staging_directory,
)
from shared.models.conversion import convert_gguf
from shared.models.drafts import BUILTIN_DRAFTS, BuiltinDraft, build_draft
from shared.models.errors import ModelNotFound, ModelUnusable
from shared.models.fingerprint import file_sha256, model_fingerprint, remembered_sha256, weight_files
from shared.models.hub import fetch_snapshot, is_hub_name
from shared.models.progress import Progress, silent

_CONVERTER = "c1"
"""Part of every converted entry's name: a change of the conversion must not meet its predecessor's files."""
_BUILDER = "d1"
"""The same for drafts that are built from packed layers."""
_EXPANSION = 10
"""fp32 weights take at most this many times the size of a GGUF file (3-bit quants)."""


@dataclass(frozen=True)
class ModelFiles:
    """A model on disk: config.json, *.safetensors, tokenizer.json and usually a chat template in `path`.

    `name` is what clients call it. `fingerprint` is 32 hex digits over config and weights.
    """

    name: str
    path: Path
    fingerprint: str


def resolve_model(name: str, *, progress: Progress | None = None, fetch: bool = True) -> ModelFiles:
    """Find (and with `fetch`, download or convert if need be) the model called `name`. Blocks, for minutes at worst.

    `name` is a built-in name, a directory, a .gguf file or a hub name `owner/model`, looked up in this order. Several
    processes may ask at once; one of them does the work.

    Raises:
        ModelNotFound: nothing has this name, or it cannot be fetched.
        ModelUnusable: damaged, in a refused format, or no disk or memory to convert it.
    """
    report = progress or silent
    try:
        if name in BUILTIN_MODELS:
            return _resolve_builtin(BUILTIN_MODELS[name], fetch, report)
        if name in BUILTIN_DRAFTS:
            return _resolve_draft(BUILTIN_DRAFTS[name], fetch, report)
        path = Path(name).expanduser()
        if name and path.is_dir():
            resolved = path.resolve()
            return _checked(resolved.name, resolved, report)
        if path.is_file():
            return _resolve_file(path.resolve(), fetch, report)
        if is_hub_name(name) and not name.endswith(".gguf"):
            return _checked(name, fetch_snapshot(name, fetch=fetch, progress=report), report)
    except OSError as error:
        raise ModelUnusable(f"model {name}: {error.strerror or error} ({error.filename or 'no file named'})") from error
    known = ", ".join([*BUILTIN_MODELS, *BUILTIN_DRAFTS])
    raise ModelNotFound(f"no model {name!r}: not built in ({known}), no such directory or .gguf file, no hub name")


def _resolve_builtin(model: BuiltinModel, fetch: bool, progress: Progress) -> ModelFiles:
    target = models_root() / f"{model.name}-{model.sha256[:12]}-{_CONVERTER}"
    if (found := _cached(model.name, target)) is not None:
        return found
    if not fetch:
        raise ModelNotFound(f"model {model.name} is not fetched yet; run `headrace model fetch {model.name}`")
    with exclusive(target, progress):
        if (found := _cached(model.name, target)) is not None:
            return found
        require_space(target.parent, model.needed_bytes, f"fetching and converting {model.name}")
        with staging_directory(target) as workdir:
            gguf = fetch_builtin(model, workdir, progress)
            converted = _convert(gguf, workdir, progress)
            return _sealed(converted, target, model.name, model.requirement, progress)


def _resolve_draft(draft: BuiltinDraft, fetch: bool, progress: Progress) -> ModelFiles:
    """Built from the target, in a second, once that is there."""
    target = models_root() / f"{draft.name}-{draft.digest}-{_BUILDER}"
    if (found := _cached(draft.name, target)) is not None:
        return found
    of = _resolve_builtin(BUILTIN_MODELS[draft.target], fetch, progress)
    with exclusive(target, progress):
        if (found := _cached(draft.name, target)) is not None:
            return found
        require_space(target.parent, draft.needed_bytes, f"building {draft.name}")
        with staging_directory(target) as workdir:
            built = workdir / "built"
            built.mkdir()
            progress("convert", 0, 1)
            build_draft(draft.packed, of.path, built)
            _require_parts(built)
            return _sealed(built, target, draft.name, f"{draft.target} and packed layers", progress)


def _resolve_file(path: Path, fetch: bool, progress: Progress) -> ModelFiles:
    if path.suffix.lower() != ".gguf":
        raise ModelUnusable(f"{path} is not a .gguf file; give a .gguf file or a directory with safetensors")
    target = models_root() / f"{path.stem}-{remembered_sha256(path, progress)[:12]}-{_CONVERTER}"
    if (found := _cached(path.stem, target)) is not None:
        return found
    if not fetch:
        raise ModelNotFound(f"{path} is not converted yet; run `headrace model fetch {path}`")
    with exclusive(target, progress):
        if (found := _cached(path.stem, target)) is not None:
            return found
        require_space(target.parent, path.stat().st_size * _EXPANSION, f"converting {path.name}")
        with staging_directory(target) as workdir:
            converted = _convert(path, workdir, progress)
            return _sealed(converted, target, path.stem, path.name, progress)


def _cached(name: str, target: Path) -> ModelFiles | None:
    record = read_entry(target)
    return ModelFiles(name, target, record.fingerprint) if record is not None else None


def _convert(gguf: Path, workdir: Path, progress: Progress) -> Path:
    converted = workdir / "converted"
    converted.mkdir()
    convert_gguf(gguf, converted, progress)
    _require_parts(converted)
    return converted


def _sealed(converted: Path, target: Path, name: str, source: str, progress: Progress) -> ModelFiles:
    fingerprint = model_fingerprint(converted, progress, sha256=file_sha256)
    seal_entry(converted, target, name, source, fingerprint)
    return ModelFiles(name, target, fingerprint)


def _checked(name: str, directory: Path, progress: Progress) -> ModelFiles:
    _require_parts(directory)
    return ModelFiles(name, directory, model_fingerprint(directory, progress, sha256=remembered_sha256))


def _require_parts(directory: Path) -> None:
    if missing := [part for part in ("config.json", "tokenizer.json") if not (directory / part).is_file()]:
        raise ModelUnusable(f"{directory} has no {' and no '.join(missing)}")
    if not weight_files(directory):
        pickled = any(directory.glob("*.bin")) or any(directory.glob("*.pt*"))
        hint = "; pickled weights (.bin, .pt) are refused, convert them to safetensors" if pickled else ""
        raise ModelUnusable(f"{directory} has no *.safetensors file{hint}")
