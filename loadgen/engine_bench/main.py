"""The command line: which parts are measured, in which order, and where the figures go."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
import transformers
import typer
from rich.console import Console

from loadgen.engine_bench import context, decode, loops, peers, prefill, quality, sampling, startup, verify
from loadgen.engine_bench.errors import MeasurementError
from loadgen.engine_bench.plan import FULL, QUICK, Plan
from loadgen.engine_bench.section import Section, show
from loadgen.engine_bench.subjects import Subjects
from loadgen.machine import machine_facts
from shared.engine import EngineError
from shared.engine.kernels import best_variant
from shared.models.errors import ModelError

CpuDtype = Literal["fp16-packed", "int8", "fp32"]
Measure = Callable[[Subjects, Plan], Section]

_PARTS = ("decode", "verify", "sampling", "prefill", "context", "startup", "quality", "peers", "loops")

_WIDTH = 120
"""Columns of the table where the output is no terminal."""


class Report(msgspec.Struct, frozen=True):
    """`facts` describe machine, versions and settings."""

    facts: dict[str, str | int | float]
    sections: list[Section]


def chosen_parts(only: str) -> list[str]:
    """The parts named in `only`, separated by commas, in the order of the table. Raises typer.BadParameter."""
    wanted = [name.strip() for name in only.split(",") if name.strip()] or list(_PARTS)
    if unknown := [name for name in wanted if name not in _PARTS]:
        raise typer.BadParameter(f"no part {unknown[0]!r}; choose from {', '.join(_PARTS)}", param_hint="--only")
    return [name for name in _PARTS if name in wanted]


def _measures(dtype: CpuDtype) -> dict[str, Measure]:
    modules = (decode, verify, sampling, prefill, context, startup, quality, peers)
    found: dict[str, Measure] = {module.__name__.rpartition(".")[2]: module.measure for module in modules}
    return found | {"loops": partial(loops.measure, dtype=dtype)}


def _facts(subjects: Subjects, quick: bool) -> dict[str, str | int | float]:
    return {
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        **machine_facts(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "kernels": best_variant(),
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
        "threads": torch.get_num_threads(),
        "load_before": round(os.getloadavg()[0], 2),
        "model": subjects.files.name,
        "extent": "quick" if quick else "full",
    }


def _headline(facts: dict[str, str | int | float]) -> str:
    return (
        f"{facts['model']} on {facts['cpu']} ({facts['instructions']}, {facts['cores']} cores; kernels "
        f"{facts['kernels']}), torch {facts['torch']}, transformers {facts['transformers']}, {facts['threads']} "
        f"thread(s); load before {facts['load_before']}; medians, {facts['extent']} run"
    )


def main(
    model: Annotated[str, typer.Option(help="A name that HEADRACE_MODEL takes")] = "smollm2-135m-instruct",
    only: Annotated[str, typer.Option(help=f"Parts, separated by commas: {', '.join(_PARTS)}")] = "",
    quick: Annotated[bool, typer.Option(help="Fewer rounds, shorter text")] = False,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the engine and of Transformers")] = 1,
    kv_mib: Annotated[int, typer.Option(min=16, help="KV cache of each engine; used memory is less")] = 1024,
    gguf: Annotated[
        Path | None,
        typer.Option(envvar="HEADRACE_BENCH_GGUF", exists=True, help="The same model for llama.cpp, if installed"),
    ] = None,
    dtype: Annotated[CpuDtype, typer.Option(help="Closed loops")] = "fp16-packed",
    requests: Annotated[int | None, typer.Option(min=2, help="Closed loops: requests per concurrency")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Closed loops")] = 128,
    output_tokens: Annotated[int | None, typer.Option(min=2, help="Closed loops")] = None,
    seed: Annotated[int, typer.Option(help="Closed loops: draws the prompts")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file")] = None,
) -> None:
    """Measure the engine beside its peers and the machine, and print a table."""
    names = chosen_parts(only)
    plan = QUICK if quick else FULL
    plan = replace(plan, prompt_tokens=prompt_tokens, seed=seed, gguf=gguf)
    plan = replace(plan, requests=requests or plan.requests, output_tokens=output_tokens or plan.output_tokens)
    measures = _measures(dtype)
    try:
        subjects = Subjects(model, threads, kv_mib << 20)
    except ModelError as error:
        raise typer.BadParameter(str(error), param_hint="--model") from error
    facts = _facts(subjects, quick)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print(_headline(facts), highlight=False)
    sections: list[Section] = []
    failed = False
    for name in names:
        try:
            with console.status(f"measuring {name}"):
                section = measures[name](subjects, plan)
        except (EngineError, MeasurementError) as error:
            section, failed = Section(name, name, [], [], [f"not measured: {error}"]), True
        sections.append(section)
        show(console, section)
        if json is not None:
            json.write_bytes(msgspec.json.format(msgspec.json.encode(Report(facts, sections)), indent=2))
    if failed:
        raise typer.Exit(1)
