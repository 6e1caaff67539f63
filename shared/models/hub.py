"""Models from the Hugging Face hub: a snapshot of config, tokenizer and safetensors weights, and nothing executable."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from shared.models.errors import ModelNotFound, ModelUnusable
from shared.models.progress import Progress

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WANTED = ["*.safetensors", "*.json", "*.jinja"]
_UNWANTED = ["*/*"]  # other formats of the same weights (onnx/, original/) live in folders


def is_hub_name(name: str) -> bool:
    """`owner/model`, the only form that is looked up at the hub."""
    return _NAME.fullmatch(name) is not None


def fetch_snapshot(name: str, *, fetch: bool, progress: Progress) -> Path:
    """The local snapshot of a hub model, downloaded when `fetch` allows. Honours HF_HOME, HF_TOKEN, HF_ENDPOINT.

    Raises:
        ModelNotFound: neither in the local hub cache nor to be had from the hub.
        ModelUnusable: the repository is gated.
    """
    from huggingface_hub import snapshot_download  # noqa: PLC0415 (slow; only hub names need it)
    from huggingface_hub.errors import (  # noqa: PLC0415
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    wanted: dict[str, Any] = {"allow_patterns": _WANTED, "ignore_patterns": _UNWANTED}
    try:
        return Path(snapshot_download(name, local_files_only=True, **wanted))
    except LocalEntryNotFoundError as error:
        if not fetch:
            raise ModelNotFound(
                f"model {name} is not in the local hub cache; run `headrace model fetch {name}`"
            ) from error
    progress("download", 0, 0)
    try:
        return Path(snapshot_download(name, **wanted))
    except GatedRepoError as error:
        raise ModelUnusable(f"model {name} is gated at the hub; accept its terms there and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(f"the hub has no model {name} (or it is private and HF_TOKEN is not set)") from error
    except Exception as error:  # the hub's client raises errors of four libraries for one dead network
        raise ModelNotFound(
            f"model {name} is not on this machine and the hub cannot be reached ({type(error).__name__}); "
            "give a directory or a .gguf file, or go online"
        ) from error
