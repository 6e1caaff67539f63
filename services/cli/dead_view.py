"""How dead letters are shown: as a table, in full, or as JSON for programs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from services.cli.dead_letters import DeadLetter, Retried

_PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
_UNREADABLE = "(unreadable)"


def print_list(letters: Sequence[DeadLetter], console: Console) -> None:
    if not letters:
        console.print("no dead letters", markup=False)
        return
    table = Table(box=None, header_style="dim", pad_edge=False)
    for column in ("seq", "time", "stage", "request", "tenant", "model", "cause", "crashed workers"):
        table.add_column(column, overflow="fold")
    for letter in letters:
        cells = (
            str(letter.seq), _time(letter.buried_unix_s), letter.stage, letter.request_id or _UNREADABLE,
            letter.tenant, letter.model, letter.cause, ", ".join(letter.crashed),
        )  # fmt: skip
        table.add_row(*(cell.replace("[", r"\[") for cell in cells))
    console.print(table)


def print_one(letter: DeadLetter, console: Console, *, prompt: bool) -> None:
    """A line for each thing that is known."""
    lines: dict[str, object] = {
        "seq": letter.seq,
        "time": _time(letter.buried_unix_s),
        "stage": letter.stage,
        "cause": letter.cause,
        "crashed workers": ", ".join(letter.crashed) or "none",
        "request": letter.request_id or _UNREADABLE,
    }
    if letter.params is not None:
        lines |= {
            "tenant": letter.tenant,
            "model": letter.model,
            "api": letter.api,
            "priority": letter.priority,
            "created": _time(letter.created_unix_s),
            "prompt tokens": letter.prompt_tokens,
            **msgspec.to_builtins(letter.params),
        }
    if prompt:
        lines["prompt ids"] = " ".join(map(str, letter.prompt_ids))
    width = max(map(len, lines))
    for name, value in lines.items():
        console.print(f"{name:<{width}}  {value}", markup=False)


def print_retried(letter: DeadLetter, retried: Retried, url: str, console: Console) -> None:
    console.print(f"{letter.seq} is queued again as {retried.request_id}", markup=False)
    console.print(f"read it at {url}{_PATHS.get(letter.api, '')}/{retried.request_id}", markup=False)
    console.print(f"or follow the NATS subject {retried.live_subject} (tenant {retried.tenant})", markup=False)


def as_json(shown: Sequence[DeadLetter] | DeadLetter | Retried, *, prompt: bool = False) -> str:
    """Dead letters without their prompts unless asked for."""
    plain = msgspec.to_builtins(shown)
    for letter in plain if isinstance(plain, list) else [plain]:
        _hide(letter, prompt=prompt)
    return msgspec.json.format(msgspec.json.encode(plain), indent=2).decode()


def _hide(letter: dict[str, Any], *, prompt: bool) -> None:
    if not prompt:
        letter.pop("prompt_ids", None)


def _time(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))
