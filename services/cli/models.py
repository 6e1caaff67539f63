"""`headrace model fetch` and `headrace model list`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from services.cli.startup_view import ModelProgress
from shared.models import resolve_model
from shared.models.builtin import BUILTIN_MODELS
from shared.models.cache import models_root, read_entry
from shared.models.drafts import BUILTIN_DRAFTS


def fetch(name: str, console: Console) -> None:
    """Raises ModelError."""
    with ModelProgress(console, name) as progress:
        files = resolve_model(name, progress=progress.report)
    console.print(f"{files.name} is in {files.path} (fingerprint {files.fingerprint})", markup=False)


def show(console: Console) -> None:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for column in ("model", "size", "licence", "source", "directory"):
        table.add_column(column, no_wrap=True)
    root = models_root()
    entries = [(path, record) for path in sorted(root.glob("*")) if (record := read_entry(path)) is not None]
    licences = {name: model.licence for name, model in BUILTIN_MODELS.items()}
    licences |= {name: draft.licence for name, draft in BUILTIN_DRAFTS.items()}
    for path, record in entries:
        size = f"{sum(record.sizes.values()) / 1e6:.0f} MB"
        table.add_row(record.name, size, licences.get(record.name, ""), record.source, str(path))
    present = {record.name for _, record in entries}
    for name, model in BUILTIN_MODELS.items():
        if name not in present:
            table.add_row(name, "", model.licence, model.requirement, "not fetched yet")
    for name, draft in BUILTIN_DRAFTS.items():
        if name not in present:
            table.add_row(name, "", draft.licence, f"{draft.target} and packed layers", "not built yet")
    console.print(table)
