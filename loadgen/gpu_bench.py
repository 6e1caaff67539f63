"""`python -m loadgen.gpu_bench`: the CUDA path beside Transformers and beside what the device can do, in 8 minutes.

First whether it is right: tokens against `generate`, and every bit against a mix of batches. Then what it costs: steps
against reading weights and KV once, prompts against a plain product. Where torch sees no GPU it says so; exit status 2.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

BUDGET_S = 450.0
"""Sections that would begin later than this are left out, and said to be."""

NO_GPU = 2

BATCHES = (1, 4, 8, 32)
CONTEXTS = (200, 2000)
PROMPTS = (1, 5, 17, 31, 32, 33, 64, 100, 127, 128, 129, 255, 300, 513, 700, 1100)
NEW_TOKENS = 48
PREFILL_TOKENS = 2000
BATCH_TOKENS = 2048
STEPS = 30
MIX_LENGTHS = (1, 40, 129, 300, 513, 600)
GIB = 1 << 30


@dataclass
class Report:
    """What was found, printed as it is found. `wrong` counts what must not be: it decides over the exit status."""

    started_s: float = field(default_factory=time.monotonic)
    figures: dict[str, Any] = field(default_factory=dict)
    wrong: int = 0

    def say(self, key: str, value: Any, text: str) -> None:
        self.figures[key] = value
        print(f"{time.monotonic() - self.started_s:6.1f} s  {text}", flush=True)

    def in_time(self, section: str) -> bool:
        if time.monotonic() - self.started_s < BUDGET_S:
            return True
        self.say(f"{section}_left_out", True, f"{section}: left out, {BUDGET_S:g} s are over")
        return False


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 all right, 1 something differed, 2 there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m loadgen.gpu_bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a name or directory, as for the services")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args(argv)
    missing = _missing()
    if missing:
        print(f"bench-gpu: nothing was run: {missing}")
        return NO_GPU
    report = Report()
    run(report, args.model)
    if args.json is not None:
        args.json.write_text(json.dumps(report.figures, indent=1) + "\n", encoding="utf-8")
    return 1 if report.wrong else 0


def _missing() -> str | None:
    """Why there is nothing to measure, if so."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch  # noqa: PLC0415 - only where it is installed

    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def run(report: Report, model: str) -> None:
    """All sections, each with an engine of its own that is gone before the next is loaded."""
    import torch  # noqa: PLC0415 - needs a GPU

    from shared.engine.config import EngineConfig  # noqa: PLC0415 - needs torch
    from shared.models import resolve_model  # noqa: PLC0415

    found = resolve_model(model)
    config = EngineConfig(
        model_path=found.path,
        model_name=found.name,
        fingerprint=found.fingerprint,
        kv_memory_bytes=min(16 * GIB, int(0.4 * torch.cuda.mem_get_info()[0])),
        device="cuda",
        dtype="bf16",
        max_batch_tokens=BATCH_TOKENS,
        max_running=max(BATCHES),
    )
    limits = _device_limits(report)
    torch.cuda.empty_cache()
    tokens = _text_tokens(found.path)
    ours: list[list[int]] = []

    def exact(runner: Any) -> None:
        _mixer(report, runner, tokens)
        ours.extend(_greedy(report, runner, tokens))
        _steps(report, "exact_graphs", runner, limits)
        _prefill(report, "exact_graphs", runner, limits)

    def speed(name: str, runner: Any) -> None:
        _steps(report, name, runner, limits)
        _prefill(report, name, runner, limits)

    _with_engine(report, "exact_graphs", config, exact)
    if report.in_time("parity"):
        _parity(report, found.path, tokens, ours)
    for name, changed in (
        ("exact_eager", replace(config, cuda_graphs=False)),
        ("fast_graphs", replace(config, exactness="fast")),
        ("exact_torch", replace(config, attention="torch")),
    ):
        if report.in_time(name):
            _with_engine(report, name, changed, partial(speed, name))


def _with_engine(report: Report, name: str, config: Any, body: Callable[[Any], None]) -> None:
    """Load, run `body`, and give the device's memory back."""
    import torch  # noqa: PLC0415 - needs a GPU

    from shared.engine.runner import ModelRunner  # noqa: PLC0415

    began = time.monotonic()
    runner = ModelRunner.load(config)
    took = time.monotonic() - began
    text = f"{name}: loaded in {took:.1f} s, attention {runner.attention_name}, graphs of {runner.graph_rows} rows"
    report.say(f"{name}_load_s", round(took, 2), text)
    body(runner)
    del runner
    gc.collect()
    torch.cuda.empty_cache()


# What the device can do


def _device_limits(report: Report) -> dict[str, float]:
    """Bytes read and operations done in a second, by plain torch calls on tensors that fit no cache."""
    import torch  # noqa: PLC0415 - needs a GPU

    name = torch.cuda.get_device_name()
    report.say("device", name, f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    read = torch.ones(GIB, dtype=torch.float32, device="cuda")
    read_s = _median_s(lambda: torch.sum(read))
    size = 8192
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_s = _median_s(lambda: left @ right)
    limits = {"read_bytes_s": read.numel() * 4 / read_s, "bf16_flop_s": 2 * size**3 / product_s}
    text = f"reads {limits['read_bytes_s'] / 1e12:.2f} TB/s, multiplies {limits['bf16_flop_s'] / 1e12:.0f} TFLOP/s bf16"
    report.say("limits", limits, text)
    return limits


def _median_s(call: Callable[[], Any], repeats: int = 15) -> float:
    """Seconds on the device, by its own events."""
    import torch  # noqa: PLC0415 - needs a GPU

    took: list[float] = []
    for number in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        if number >= 3:
            took.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(took)


# Whether it is right


def _text_tokens(path: Path) -> list[int]:
    """Ids of a text that comes with the benchmarks, repeated to twice the longest prompt and more."""
    from tokenizers import Tokenizer  # noqa: PLC0415 - needs the engine's packages

    text = files("loadgen.engine_bench").joinpath("prose.txt").read_text(encoding="utf-8")
    ids: list[int] = Tokenizer.from_file(str(path / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return ids * (1 + 2 * PREFILL_TOKENS // len(ids))


def _prompts(tokens: list[int]) -> list[list[int]]:
    return [tokens[7 * i : 7 * i + length] for i, length in enumerate(PROMPTS)]


def _mixer(report: Report, runner: Any, tokens: list[int]) -> None:
    from loadgen.gpu_mixer import mix  # noqa: PLC0415 - needs torch

    texts = [tokens[11 * i : 11 * i + length] for i, length in enumerate(MIX_LENGTHS)]
    mixed = mix(runner, texts, rounds=4, seed=1, most_rows=BATCH_TOKENS)
    report.wrong += mixed.differing
    text = f"batch invariance: {mixed.differing} of {mixed.rows} rows and {mixed.tokens} cached tokens differ"
    report.say("mixer", mixed.__dict__, text)


def _greedy(report: Report, runner: Any, tokens: list[int]) -> list[list[int]]:
    """All prompts in one batch, as serving does it: graphs wherever a step fits one."""
    from shared.engine.batch import SequenceRows  # noqa: PLC0415 - needs torch

    prompts = _prompts(tokens)
    block_tokens = runner.layout.block_tokens
    blocks: list[list[int]] = []
    at = 0
    for prompt in prompts:
        need = -(-(len(prompt) + NEW_TOKENS) // block_tokens)
        blocks.append(list(range(at, at + need)))
        at += need
    outputs: list[list[int]] = []
    for prompt, held in zip(prompts, blocks, strict=True):
        outputs.append([int(runner.forward([SequenceRows(prompt, 0, held, 1)])[0].argmax())])
    for step in range(NEW_TOKENS - 1):
        rows = [
            SequenceRows([output[-1]], len(prompt) + step, held, 1)
            for prompt, output, held in zip(prompts, outputs, blocks, strict=True)
        ]
        for output, logits in zip(outputs, runner.forward(rows), strict=True):
            output.append(int(logits.argmax()))
    report.say("generated", len(outputs) * NEW_TOKENS, f"{len(outputs)} prompts answered, {NEW_TOKENS} tokens each")
    return outputs


def _parity(report: Report, path: Path, tokens: list[int], ours: list[list[int]]) -> None:
    """Against `generate`, greedy, same dtype. Where they part, by how much Transformers preferred its token to ours."""
    import torch  # noqa: PLC0415 - needs a GPU
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, local_files_only=True).to("cuda").eval()
    gaps: list[float] = []
    equal = 0
    with torch.inference_mode():
        for prompt, mine in zip(_prompts(tokens), ours, strict=True):
            ids = torch.tensor([prompt], device="cuda")
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
                repetition_penalty=1.0,
                eos_token_id=None,
                pad_token_id=0,
            )
            theirs = out[0, len(prompt) :].tolist()
            parted = next((i for i, (a, b) in enumerate(zip(theirs, mine, strict=True)) if a != b), None)
            if parted is None:
                equal += 1
                continue
            ids = torch.tensor([prompt + theirs[:parted]], device="cuda")
            logits = model(ids, logits_to_keep=1).logits[0, -1].float()
            gaps.append(round(float(logits[theirs[parted]] - logits[mine[parted]]), 4))
    spacing = 2.0**-3  # between neighbouring bf16 numbers from 16 to 32, where the best logits lie
    far = [gap for gap in gaps if gap > 4 * spacing]
    report.wrong += len(far)
    report.say(
        "parity",
        {"equal": equal, "prompts": len(ours), "gaps": gaps},
        f"Transformers: {equal} of {len(ours)} answers equal; gaps of the two logits where the others part: {gaps}",
    )


# What it costs


def _steps(report: Report, name: str, runner: Any, limits: dict[str, float]) -> None:
    """Wall time of a pass with logits on the host, and the least time in which its weights and KV can be read."""
    import torch  # noqa: PLC0415 - needs a GPU

    from shared.engine.batch import SequenceRows  # noqa: PLC0415

    layout = runner.layout
    runner.cache.data.normal_()
    weights = _weight_bytes(runner)
    for context in CONTEXTS:
        for batch in BATCHES:
            need = -(-(context + 1) // layout.block_tokens)
            if need * batch > runner.cache.num_blocks:
                continue
            rows = [SequenceRows([i + 1], context, list(range(i * need, (i + 1) * need)), 1) for i in range(batch)]
            took: list[float] = []
            for number in range(STEPS + 5):
                torch.cuda.synchronize()
                began = time.perf_counter()
                runner.forward(rows)
                if number >= 5:
                    took.append(time.perf_counter() - began)
            step_ms = statistics.median(took) * 1e3
            kv_bytes = batch * context * layout.block_bytes // layout.block_tokens
            bound_ms = (weights + kv_bytes) / limits["read_bytes_s"] * 1e3
            report.say(
                f"{name}_step_ms_b{batch}_c{context}",
                {"step_ms": round(step_ms, 3), "bound_ms": round(bound_ms, 3)},
                f"{name}: batch {batch:2}, context {context:4}: {step_ms:7.3f} ms, reading alone {bound_ms:7.3f} ms "
                f"({step_ms / bound_ms:.1f}x)",
            )


def _weight_bytes(runner: Any) -> int:
    """What one step reads of the weights: all but input embeddings that are nothing else."""
    module = runner.model.module
    stored = {p.data_ptr(): p.numel() * p.element_size() for p in module.parameters()}
    head, embeddings = module.get_output_embeddings().weight, module.get_input_embeddings().weight
    if head.data_ptr() != embeddings.data_ptr():
        stored.pop(embeddings.data_ptr(), None)
    return sum(stored.values())


def _prefill(report: Report, name: str, runner: Any, limits: dict[str, float]) -> None:
    """One prompt in one pass; its operations (attention's counted in) against the rate of a plain large product."""
    from shared.engine.batch import SequenceRows  # noqa: PLC0415 - needs torch

    count = min(PREFILL_TOKENS, runner.model.context_length - 1)
    layout = runner.layout
    blocks = list(range(-(-count // layout.block_tokens)))
    rows = [SequenceRows([i % runner.model.vocab_size for i in range(count)], 0, blocks, 1)]
    took: list[float] = []
    for _ in range(8):
        began = time.perf_counter()
        runner.forward(rows)
        took.append(time.perf_counter() - began)
    seconds = statistics.median(took[2:])
    module = runner.model.module
    head = module.get_output_embeddings().weight
    products = sum(p.numel() for p in module.base_model.parameters() if p.dim() == 2)
    products -= module.get_input_embeddings().weight.numel()
    attention = 2 * 2 * runner.model.query_heads * layout.head_dim * layout.layers * count * (count + 1) / 2
    rate = (2 * products * count + 2 * head.numel() + attention) / seconds
    report.say(
        f"{name}_prefill",
        {"tokens_s": round(count / seconds), "flop_s": rate, "of_product_rate": rate / limits["bf16_flop_s"]},
        f"{name}: prompt of {count} tokens: {count / seconds:,.0f} tokens/s, "
        f"{100 * rate / limits['bf16_flop_s']:.0f} % of the product rate",
    )


if __name__ == "__main__":
    sys.exit(main())
