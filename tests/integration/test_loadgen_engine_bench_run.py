"""The engine's benchmark as a whole, on a tiny model: all parts, the processes that it starts, its report."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
import torch
import typer
from typer.testing import CliRunner

from loadgen.engine_bench import llama_peer
from loadgen.engine_bench.main import Report, main
from loadgen.engine_bench.plan import QUICK
from loadgen.engine_bench.subjects import Subjects
from tests.unit.engine_harness import tiny_model

app = typer.Typer()
app.command()(main)


def perplexity(model: Path) -> float:
    """Of the text's first tokens, by Transformers' own loss."""
    subjects = Subjects(str(model), 1, 1)
    ids = torch.tensor([subjects.prose[: QUICK.quality_tokens]])
    with torch.no_grad():
        return math.exp(subjects.transformers.model(input_ids=ids, labels=ids).loss)


def test_every_part_that_a_tiny_model_has_room_for_is_measured_and_written(tmp_path: Path) -> None:
    tiny = tiny_model(tmp_path / "tiny", max_position_embeddings=4096)
    parts = ["decode", "verify", "sampling", "prefill", "startup", "quality", "peers", "loops"]
    command = ["--model", str(tiny), "--quick", "--kv-mib", "16", "--only", ",".join(parts), "--json"]
    result = CliRunner().invoke(app, [*command, str(tmp_path / "report.json")])
    assert result.exit_code == 0, result.output
    report = msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=Report)
    assert [section.name for section in report.sections] == parts
    for section in report.sections:
        assert all(1 <= len(line.values) <= len(section.columns) for line in section.lines)
        names = [(line.figure, line.unit) for line in section.lines]
        assert len(names) == len(set(names))
        values = [value for line in section.lines for value in line.values if isinstance(value, float)]
        assert values
        assert all(math.isfinite(value) for value in values)
    quality = {line.figure: line.values for s in report.sections if s.name == "quality" for line in s.lines}
    assert quality["positions with another best token"][:2] == [0.0, 0.0]  # our fp32 is Transformers' fp32
    assert quality["perplexity"][:2] == pytest.approx([perplexity(tiny)] * 2, rel=1e-5)
    if not llama_peer.is_installed():
        assert "not installed" in result.output


def test_a_part_that_cannot_be_measured_says_why_and_the_others_go_on(tmp_path: Path) -> None:
    small = tiny_model(tmp_path / "small", max_position_embeddings=512)
    command = ["--model", str(small), "--quick", "--kv-mib", "16", "--only", "context,verify,prefill"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert result.output.count("not measured: ") == 2
    assert "5 rows / 1 row" in result.output
