"""One part of the table: lines of figures, the same for the terminal and for the JSON file."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

_LABEL_WIDTH = 40
_VALUE_WIDTH = 12
_COLUMNS = 5

Value = float | str | None


class Line(msgspec.Struct, frozen=True):
    """One figure, in each column of its section. None where a column has no such figure."""

    figure: str
    unit: str
    values: Sequence[Value]


class Section(msgspec.Struct, frozen=True):
    name: str
    title: str
    columns: list[str]
    lines: list[Line]
    notes: list[str] = []


def format_value(value: Value) -> str:
    """Numbers with three digits that count."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    digits = 0 if size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{value:,.{digits}f}" if size >= 0.0995 or value == 0 else f"{value:.3g}"


def show(console: Console, section: Section) -> None:
    """Sections have columns of the same widths, so that they look like one table."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column(section.title, width=_LABEL_WIDTH)
    for column in [*section.columns, *[""] * (_COLUMNS - len(section.columns))]:
        table.add_column(column, width=_VALUE_WIDTH, justify="right")
    for line in section.lines:
        unit = f", {line.unit}" if line.unit else ""
        table.add_row(f"{line.figure}{unit}", *map(format_value, line.values))
    console.print(table)
    for note in section.notes:
        console.print(f" {note}", style="dim", highlight=False)
    console.print()
