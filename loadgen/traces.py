"""Recorded request traces: the Azure LLM inference CSV and Mooncake's JSON lines, scaled to a machine's size."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from loadgen.errors import TraceUnreadable

MOONCAKE_BLOCK_TOKENS: Final = 512
MAX_ROWS: Final = 1_000_000


@dataclass(frozen=True)
class TraceRequest:
    """One request: offset from the trace's first one in seconds, lengths in tokens, ids of its prompt's blocks."""

    offset_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    block_tokens: float = 0.0


@dataclass(frozen=True)
class TraceScale:
    """Lengths are multiplied by `length`, then cut at the caps; offsets by `time` (0.1: ten times faster)."""

    length: float = 1.0
    time: float = 1.0
    max_prompt_tokens: int = MAX_ROWS
    max_output_tokens: int = MAX_ROWS


@dataclass(frozen=True)
class Trace:
    """A trace as it will be replayed. `clipped` counts requests that a cap made shorter."""

    name: str
    requests: tuple[TraceRequest, ...]
    clipped: int


class _MooncakeRow(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_trace(path: Path, limit: int, scale: TraceScale, *, duration_s: float | None = None) -> Trace:
    """The first `limit` requests, or those before `duration_s` (after scaling). Raises TraceUnreadable."""
    rows = _read_mooncake(path) if path.suffix == ".jsonl" else _read_azure(path)
    try:
        raw = sorted(itertools.islice(rows, min(limit, MAX_ROWS)), key=lambda request: request.offset_s)
    except OSError as error:
        raise TraceUnreadable(f"cannot read {path}: {error.strerror}") from error
    if not raw:
        raise TraceUnreadable(f"{path} holds no requests")
    requests: list[TraceRequest] = []
    clipped = 0
    for request in raw:
        prompt = max(1, math.ceil(request.prompt_tokens * scale.length))
        output = max(1, math.ceil(request.output_tokens * scale.length))
        offset_s = (request.offset_s - raw[0].offset_s) * scale.time
        if duration_s is not None and offset_s >= duration_s:
            break
        clipped += prompt > scale.max_prompt_tokens or output > scale.max_output_tokens
        requests.append(
            TraceRequest(
                offset_s,
                min(prompt, scale.max_prompt_tokens),
                min(output, scale.max_output_tokens),
                request.block_ids,
                request.block_tokens * scale.length,
            )
        )
    return Trace(path.name, tuple(requests), clipped)


def _read_azure(path: Path) -> Iterator[TraceRequest]:
    """Columns TIMESTAMP, ContextTokens, GeneratedTokens."""
    first: datetime | None = None
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                at = datetime.fromisoformat(row["TIMESTAMP"])
                first = first or at
                yield TraceRequest((at - first).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
            except (KeyError, TypeError, ValueError) as error:
                raise TraceUnreadable(
                    f"{path} line {number}: expected the columns TIMESTAMP, ContextTokens, GeneratedTokens"
                ) from error


def _read_mooncake(path: Path) -> Iterator[TraceRequest]:
    """Objects with timestamp (ms), input_length, output_length and the ids of the prompt's blocks of 512 tokens."""
    decoder = msgspec.json.Decoder(_MooncakeRow)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise TraceUnreadable(f"{path} line {number}: {error}") from error
            yield TraceRequest(
                row.timestamp / 1000,
                row.input_length,
                row.output_length,
                tuple(row.hash_ids),
                MOONCAKE_BLOCK_TOKENS,
            )
