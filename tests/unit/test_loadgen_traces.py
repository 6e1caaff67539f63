"""Recorded traces are read, scaled and cut, and a bad line is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadgen.errors import TraceUnreadable
from loadgen.traces import TraceScale, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:00:00.5000000,400,40
2023-11-16 18:00:02.5000000,100,10
2023-11-16 18:00:06.5000000,9000,4
"""
MOONCAKE = [
    {"timestamp": 1000, "input_length": 1024, "output_length": 20, "hash_ids": [3, 4]},
    {"timestamp": 3000, "input_length": 700, "output_length": 10, "hash_ids": [3, 9]},
]


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    return path


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    path = tmp_path / "mooncake.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in MOONCAKE) + "\n")
    return path


def test_azure_rows_become_offsets_and_lengths(azure: Path) -> None:
    trace = read_trace(azure, 100, TraceScale())
    assert [(r.offset_s, r.prompt_tokens, r.output_tokens) for r in trace.requests] == [
        (0.0, 400, 40),
        (2.0, 100, 10),
        (6.0, 9000, 4),
    ]
    assert (trace.name, trace.clipped) == ("azure.csv", 0)


def test_mooncake_rows_keep_their_blocks(mooncake: Path) -> None:
    first, second = read_trace(mooncake, 100, TraceScale(length=0.25)).requests
    assert (first.offset_s, second.offset_s) == (0.0, 2.0)
    assert (first.prompt_tokens, first.output_tokens, first.block_ids, first.block_tokens) == (256, 5, (3, 4), 128)
    assert second.block_ids == (3, 9)


def test_lengths_time_and_caps_are_applied_and_cuts_counted(azure: Path) -> None:
    trace = read_trace(azure, 100, TraceScale(length=0.1, time=0.5, max_prompt_tokens=50, max_output_tokens=3))
    assert [(r.offset_s, r.prompt_tokens, r.output_tokens) for r in trace.requests] == [
        (0.0, 40, 3),
        (1.0, 10, 1),
        (3.0, 50, 1),
    ]
    assert trace.clipped == 2


def test_a_replay_ends_at_its_limit_or_its_duration(azure: Path) -> None:
    assert len(read_trace(azure, 2, TraceScale()).requests) == 2
    assert len(read_trace(azure, 100, TraceScale(), duration_s=2.0).requests) == 1


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("t.csv", "A,B\n1,2\n", "line 2"),
        ("t.csv", AZURE + "2023-11-16 18:00:07,many,4\n", "line 5"),
        ("t.jsonl", '{"timestamp": 0}\n', "line 1"),
        ("t.jsonl", "\n{nonsense\n", "line 2"),
        ("t.jsonl", "", "no requests"),
    ],
)
def test_an_unreadable_trace_names_the_line(tmp_path: Path, name: str, text: str, fault: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(TraceUnreadable, match=fault):
        read_trace(path, 100, TraceScale())


def test_a_missing_trace_is_a_named_error(tmp_path: Path) -> None:
    with pytest.raises(TraceUnreadable, match="No such file"):
        read_trace(tmp_path / "none.csv", 1, TraceScale())
