"""`headrace distill`, stage by stage. Each finds what its predecessor, or an earlier run, left in the directory."""

from __future__ import annotations

import argparse
import functools
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
import torch
from filelock import FileLock, Timeout
from rich.console import Console

from services.draft.distill.acceptance import Accepted, of_draft
from services.draft.distill.conversations import Script
from services.draft.distill.corpus import Corpus, Text
from services.draft.distill.errors import DistillError
from services.draft.distill.generation import Generator
from services.draft.distill.recipe import MAX_LENGTH, CorpusRecipe, TrainingRecipe, starting_layers
from services.draft.distill.result import DistillReport, pack, read_report, write_model, write_report
from services.draft.distill.student import count_of, make_student, target_config
from services.draft.distill.training import Progress, Trainer, likeliest, quickest_precision
from services.draft.distill.view import DistillView
from shared.engine import Engine, EngineConfig, EngineError
from shared.engine.config import Dtype
from shared.models import ChatTokenizer, ModelError, ModelFiles, resolve_model

WRITERS = 32
"""Texts that the target writes at once."""

_HELD_OUT_SHARE, _HELD_OUT_LEAST, _HELD_OUT_MOST = 25, 2000, 16_000
"""Held-out text: one token for so many to learn from, within bounds."""

_REPORTED_POSITIONS = 6000
"""Held-out tokens of each kind in the final figures, at most."""

_DRAFT_KV_BYTES = 64 << 20


@dataclass(frozen=True)
class Request:
    """What was asked for. `prompts` is a file of one prompt a line, `pack` where the packed layers go. The head knows
    `head_tokens` tokens; 0: all."""

    target: str
    out: Path
    tokens: int
    layers: int
    epochs: int
    head_tokens: int
    prompts: Path | None
    seed: int
    threads: int
    device: str
    pack: Path | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)
    try:
        distill(_request(arguments), console)
    except (DistillError, ModelError, EngineError) as error:
        sys.stderr.write(f"headrace: {' '.join(str(error).split())}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("headrace: interrupted; the same command goes on from here\n")
        return 130
    return 0


def distill(request: Request, console: Console) -> DistillReport:
    """Until the draft is in `request.out`. Raises DistillError, ModelError, EngineError."""
    work = request.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    lock = FileLock(work / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise DistillError(f"another distillation works in {request.out}") from error
    torch.set_num_threads(request.threads)
    try:
        with DistillView(console) as view:
            return _Run(request, work, view).run()
    finally:
        lock.release()


class _Run:
    """The stages of one distillation."""

    def __init__(self, request: Request, work: Path, view: DistillView) -> None:
        self._request = request
        self._work = work
        self._view = view
        self._device = request.device
        if self._device == "auto":
            self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._target = resolve_model(request.target, progress=view.phase)
        self._config = target_config(self._target.path)
        self._lines = _prompts_of(request.prompts)
        self._tokenizer = ChatTokenizer.load(self._target.path)
        digest = hashlib.sha256("\n".join(self._lines).encode()).hexdigest() if request.prompts else ""
        max_length = min(MAX_LENGTH, self._tokenizer.context_length)
        self._corpus_recipe = CorpusRecipe(
            self._target.name,
            self._target.fingerprint,
            self._quick_dtype,
            request.seed,
            prompts_sha256=digest,
            max_length=max_length,
        )
        total = self._config.num_hidden_layers
        if not 0 < request.layers < total:
            raise DistillError(f"{request.target} has {total} layers; --layers must be at least 1 and less than that")
        self._recipe = TrainingRecipe(
            self._corpus_recipe,
            request.tokens,
            starting_layers(total, request.layers),
            request.epochs,
            quickest_precision(self._device),
        )
        self._script = Script.of(
            self._tokenizer,
            seed=request.seed,
            max_length=max_length,
            top=self._corpus_recipe.top,
            prompts=self._lines,
        )

    def run(self) -> DistillReport:
        report = read_report(self._request.out)
        if report is None or (report.recipe, report.head_tokens) != (self._recipe, self._request.head_tokens):
            report = self._make()
        self._view.say(f"{self._request.out}: held out, {report.accepted}")
        if self._request.pack is not None:
            size = pack(self._request.out, report, self._request.pack)
            self._view.say(f"{self._request.pack}: {size:,} bytes")
        return report

    def _make(self) -> DistillReport:
        training, cpu_seconds = self._texts("corpus", self._corpus_recipe, self._request.tokens)
        served = msgspec.structs.replace(self._corpus_recipe, numerics=self._serving_dtype, held_out=True)
        wanted = min(max(self._request.tokens // _HELD_OUT_SHARE, _HELD_OUT_LEAST), _HELD_OUT_MOST)
        held_out, _ = self._texts("held-out", served, wanted)
        # What the target was asked in training as well would be no test.
        known = {_beginning(text) for text in training}
        held_out = [text for text in held_out if _beginning(text) not in known]
        student = make_student(self._target.path, self._recipe.layers, self._device)
        usable = [text for text in training if text.num_made]
        trainer = Trainer(student, usable, held_out, self._recipe, self._work / "training.safetensors")
        self._view.begin("the student learns", trainer.steps, "steps", trainer.state.step)
        trainer.run(lambda progress: self._view.at(progress.step, _note(progress)))
        size, vocabulary = self._request.head_tokens, student.head.shape[0]
        kept = likeliest(usable, vocabulary, size).tolist() if 0 < size < vocabulary else []
        write_model(student, self._target.path, self._request.out, kept, usable)
        report = DistillReport(
            recipe=self._recipe,
            texts=len(training),
            steps=trainer.steps,
            parameters=count_of(student.trained.values()),
            shared=student.shared,
            generation_cpu_seconds=round(cpu_seconds, 1),
            training_cpu_seconds=round(trainer.state.cpu_seconds, 1),
            divergence=round(trainer.state.loss, 4),
            accepted=self._measure(held_out),
            head_tokens=size,
        )
        write_report(self._request.out, report)
        return report

    def _texts(self, name: str, recipe: CorpusRecipe, tokens: int) -> tuple[list[Text], float]:
        """A corpus of `tokens` made tokens, written as far as it is missing; and the CPU seconds that it took."""
        numbers = functools.partial(self._script.numbers, held_out=recipe.held_out)
        corpus = Corpus(self._work / name, recipe, numbers)
        found = corpus.first_texts(tokens)
        if found is None:
            engine = self._engine(self._target, recipe.numerics, WRITERS, self._kv_bytes())
            purpose = "to be measured on" if recipe.held_out else "to learn from"
            self._view.begin(f"the target writes text {purpose}", tokens, "tokens", corpus.num_made)
            found = Generator(engine, self._script, corpus).run(tokens, self._view.at)
        return corpus.read(found), corpus.cpu_seconds

    def _measure(self, held_out: list[Text]) -> Accepted:
        """Of the draft as it was written, by the engine, with the numbers that a drafter computes in by default."""
        files = resolve_model(str(self._request.out))
        engine = self._engine(files, self._quick_dtype, 1, _DRAFT_KV_BYTES)
        return of_draft(engine, held_out, _REPORTED_POSITIONS)

    @property
    def _serving_dtype(self) -> Dtype:
        """As the target's workers have it by default: the student is measured against what they generate."""
        return "bf16" if self._device == "cuda" else "fp16-packed"

    @property
    def _quick_dtype(self) -> Dtype:
        """Of text to learn from and of drafts. On CPU 8-bit products where there are any, at twice the speed: what they
        change of the target's distribution is small beside what a small student gets wrong."""
        eight = self._device == "cpu" and "fbgemm" in torch.backends.quantized.supported_engines
        return "int8" if eight else self._serving_dtype

    def _engine(self, files: ModelFiles, dtype: str, places: int, kv_bytes: int) -> Engine:
        return Engine.load(
            EngineConfig(
                model_path=files.path,
                model_name=files.name,
                fingerprint=files.fingerprint,
                kv_memory_bytes=kv_bytes,
                device="cuda" if self._device == "cuda" else "cpu",
                dtype=cast(Dtype, dtype),
                threads=self._request.threads,
                max_running=places,
                max_batch_tokens=256,
            )
        )

    def _kv_bytes(self) -> int:
        """Room for all texts at their longest."""
        config = self._config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        per_token = 2 * 2 * config.num_hidden_layers * heads * head_dim
        return int(per_token * (self._corpus_recipe.max_length + 64) * WRITERS)


def _beginning(text: Text) -> tuple[int, ...]:
    """All up to the first answer."""
    first = next((turn.first for turn in text.turns if turn.role == "answer"), len(text.tokens))
    return tuple(text.tokens[:first].tolist())


def _note(progress: Progress) -> str:
    note = f"divergence {progress.loss:.3f}"
    return note if progress.accepted is None else f"{note}, held out: {progress.accepted}"


def _prompts_of(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DistillError(f"{path} cannot be read: {error}") from error
    if not (found := [line for line in lines if line]):
        raise DistillError(f"{path} holds no prompt; write one on each line")
    return found


def _request(arguments: Sequence[str] | None) -> Request:
    parser = argparse.ArgumentParser(prog="python -m services.draft.distill", description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--tokens", type=int, default=400_000)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--head-tokens", type=int, default=8192)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--pack", type=Path)
    found = parser.parse_args(arguments)
    if found.tokens < 1 or found.epochs < 1 or found.threads < 1 or found.seed < 0 or found.head_tokens < 0:
        parser.error("--tokens, --epochs and --threads must be at least 1, --seed and --head-tokens not negative")
    return Request(**vars(found))
