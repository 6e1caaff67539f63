"""`python -m shared.models`: make sure that HEADRACE_MODEL (and HEADRACE_DRAFT_MODEL) are on this machine."""

from __future__ import annotations

import os
import sys

from shared.models import ModelError, resolve_model
from shared.models.drafts import draft_of

DEFAULT = "smollm2-135m-instruct"


class _PhaseLines:
    """One line per phase, for a container's log."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._phase = ""

    def __call__(self, phase: str, _done: int, _total: int) -> None:
        if phase != self._phase:
            self._phase = phase
            print(f"{self._name}: {phase}", flush=True)


def main() -> None:
    model, draft = os.environ.get("HEADRACE_MODEL") or DEFAULT, os.environ.get("HEADRACE_DRAFT_MODEL", "auto")
    names = sys.argv[1:] or [model, draft_of(model) if draft == "auto" else draft]
    for name in filter(None, names):
        try:
            files = resolve_model(name, progress=_PhaseLines(name))
        except ModelError as error:
            sys.exit(f"headrace: {error}")
        print(f"{files.name} is in {files.path} (fingerprint {files.fingerprint})")


if __name__ == "__main__":
    main()
