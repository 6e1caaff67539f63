"""Writes the trained student: as a model directory like any other, and packed, without what the target has anyway."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save as save_arrays
from safetensors.torch import load_file, save

from services.draft.distill.acceptance import Accepted
from services.draft.distill.corpus import Text, write_whole
from services.draft.distill.recipe import TrainingRecipe
from services.draft.distill.student import Student
from services.draft.followers import count_followers
from shared.models.drafts import (
    FOLLOWERS,
    HEAD_TOKENS,
    PACK_FORMAT,
    PACKED_FOLLOWERS,
    PACKED_HEAD,
    SCALES,
    TOKENIZER_FILES,
    PackHeader,
    read_head_tokens,
)

REPORT = "distill.json"


class DistillReport(msgspec.Struct, frozen=True):
    """What was done and what came out. `parameters` are the trained ones; `divergence` is from the target's
    distribution at the end of training, in nats a token; `head_tokens` is how many tokens the head knows, 0: all."""

    recipe: TrainingRecipe
    texts: int
    steps: int
    parameters: int
    shared: list[str]
    generation_cpu_seconds: float
    training_cpu_seconds: float
    divergence: float
    accepted: Accepted
    head_tokens: int = 0
    v: int = 1


def write_model(
    student: Student, target: Path, directory: Path, head_tokens: Sequence[int], texts: Sequence[Text]
) -> None:
    """config.json, the target's tokenizer files, weights in fp16, which tokens the head knows (none given: all), and
    which tokens usually follow which in `texts`. A report of a draft that was there before goes first."""
    (directory / REPORT).unlink(missing_ok=True)
    counted = count_followers((text.tokens, text.made) for text in texts)
    write_whole(directory / FOLLOWERS, save_arrays(counted))
    (directory / HEAD_TOKENS).unlink(missing_ok=True)
    if head_tokens:
        write_whole(directory / HEAD_TOKENS, msgspec.json.encode(head_tokens))
    for name in TOKENIZER_FILES:
        if (target / name).is_file():
            shutil.copyfile(target / name, directory / name)
    config = student.config.to_dict() | {"dtype": "float16", "architectures": [type(student.module).__name__]}
    write_whole(directory / "config.json", msgspec.json.format(msgspec.json.encode(config), indent=2))
    named = dict(student.module.named_parameters())
    tensors = {name: p.detach().half().cpu().contiguous() for name, p in named.items()}
    write_whole(directory / "model.safetensors", save(tensors, {"format": "pt"}))


def read_report(directory: Path) -> DistillReport | None:
    """None when the directory holds no finished draft."""
    try:
        return msgspec.json.decode((directory / REPORT).read_bytes(), type=DistillReport)
    except (OSError, msgspec.MsgspecError):
        return None


def write_report(directory: Path, report: DistillReport) -> None:
    """Last of all: a directory with a report is finished."""
    write_whole(directory / REPORT, msgspec.json.format(msgspec.json.encode(report), indent=2))


def pack(directory: Path, report: DistillReport, path: Path) -> int:
    """The trained weights of the draft in `directory`, matrices in 8 bits with one scale a row. Returns its bytes."""
    arrays: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if name in report.shared:
            continue
        weight = tensor.float()
        if weight.dim() < 2:
            arrays[name] = weight.numpy()
            continue
        scales = weight.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
        arrays[name] = (weight / scales).round().to(torch.int8).numpy()
        arrays[name + SCALES] = scales[:, 0].numpy()
    if (directory / FOLLOWERS).is_file():
        arrays |= {PACKED_FOLLOWERS + name: array for name, array in load_arrays(directory / FOLLOWERS).items()}
    if head_tokens := read_head_tokens(directory):
        arrays[PACKED_HEAD] = np.array(head_tokens, np.int32)
    header = PackHeader(
        format=PACK_FORMAT,
        target=report.recipe.corpus.target,
        config=msgspec.json.decode((directory / "config.json").read_bytes()),
        shared=report.shared,
        report=msgspec.to_builtins(report),
    )
    data = save_arrays(arrays, {"headrace": msgspec.json.encode(header).decode()})
    write_whole(path, data)
    return len(data)
