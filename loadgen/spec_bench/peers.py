"""Transformers' own assisted generation on the same prompts, beside its plain `generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import transformers
from transformers import AutoModelForCausalLM

from loadgen.spec_bench.errors import NotMeasured
from loadgen.spec_bench.report import PeerCell
from loadgen.spec_bench.statistics import interval
from loadgen.spec_bench.workloads import Script, Size, WorkloadName, script
from shared.models import ModelError, resolve_model
from shared.models.drafts import BUILTIN_DRAFTS
from shared.models.tokenizer import ChatTokenizer

PLAIN: Final = "plain"
LOOKUP_TOKENS: Final = 10
"""What Transformers' documentation gives `prompt_lookup_num_tokens` in its example."""


class Peers:
    """The target and, where there is one, a draft for it."""

    def __init__(self, model: str, draft: str, threads: int) -> None:
        """An empty `draft` is the one that comes with the target. Raises NotMeasured."""
        torch.set_num_threads(threads)
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        files = _resolved(model)
        self._tokenizer = ChatTokenizer.load(files)
        self._model = _load(files)
        self._modes: dict[str, dict[str, Any]] = {
            PLAIN: {},
            f"prompt lookup, {LOOKUP_TOKENS}": {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
        }
        draft = draft or shipped_draft(model)
        if draft:
            self._modes["assistant model"] = {"assistant_model": _load(_resolved(draft))}

    def measure(
        self, workload: WorkloadName, size: Size, seed: int, prompts: int, progress: Callable[[int], None]
    ) -> list[PeerCell]:
        """Each prompt once in every mode, one mode right behind the other. Sampled workloads are run greedily."""
        scripts = [script(workload, size, seed, number) for number in range(prompts)]
        rates: dict[str, list[float]] = {mode: [] for mode in self._modes}
        same: dict[str, list[bool]] = {mode: [] for mode in self._modes}
        for number, one in enumerate(scripts):
            timed = self._script(one, number)
            for mode, (ids, tokens, seconds) in timed.items():
                rates[mode].append(tokens / seconds if seconds > 0 else 0.0)
                same[mode].append(ids == timed[PLAIN][0])
            progress(number + 1)
        return [
            PeerCell(
                workload=workload,
                mode=mode,
                tokens_per_s=median(rates[mode]),
                speed_up=interval(_ratios(rates[mode], rates[PLAIN]), seed),
                same_ids=sum(same[mode]) / len(same[mode]),
            )
            for mode in self._modes
        ]

    def _script(self, one: Script, number: int) -> dict[str, tuple[list[list[int]], int, float]]:
        """By mode: ids of each turn, and how many tokens came in how many seconds behind the first ones."""
        found: dict[str, tuple[list[list[int]], int, float]] = {mode: ([], 0, 0.0) for mode in self._modes}
        answers: list[str] = []
        modes = list(self._modes)
        for turn in range(one.turns):
            prompt = self._encode(one, answers)
            for mode in _rotated(modes, number + turn):
                ids, chunks = self._generate(prompt, one, mode)
                turns, tokens, seconds = found[mode]
                (first_s, first), (last_s, _) = chunks[0], chunks[-1]
                found[mode] = ([*turns, ids], tokens + max(len(ids) - first, 0), seconds + last_s - first_s)
            answers.append(_cut(self._tokenizer.decode(found[PLAIN][0][-1]), one.stop))
        return found

    def _encode(self, one: Script, answers: Sequence[str]) -> list[int]:
        prompt = one.prompt(answers)
        if one.api == "completion":
            return self._tokenizer.encode(prompt)
        return self._tokenizer.render_chat([{"role": "user", "content": prompt}])

    def _generate(self, prompt: list[int], one: Script, mode: str) -> tuple[list[int], list[tuple[float, int]]]:
        """The new ids up to a stop string, and when how many came."""
        ids = torch.tensor([prompt])
        arrived = _Arrivals()
        stopping = [_Stop(self._tokenizer, len(prompt), one.stop)] if one.stop else []
        found = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=one.max_tokens,
            do_sample=False,
            streamer=arrived,
            stopping_criteria=transformers.StoppingCriteriaList(stopping),
            **self._modes[mode],
        )
        new_ids: list[int] = found[0, len(prompt) :].tolist()
        return _until(self._tokenizer, new_ids, one.stop), arrived.chunks


class _Arrivals:
    """A streamer of `generate`: when tokens came and how many at once. It is handed the prompt first."""

    def __init__(self) -> None:
        self._prompt_seen = False
        self.chunks: list[tuple[float, int]] = []

    def put(self, value: Any) -> None:
        if self._prompt_seen:
            self.chunks.append((time.perf_counter(), int(value.numel())))
        self._prompt_seen = True

    def end(self) -> None:
        pass


class _Stop(transformers.StoppingCriteria):  # type: ignore[misc]
    """Transformers' own looks at the whole vocabulary for each string, for seconds."""

    def __init__(self, tokenizer: ChatTokenizer, prompt: int, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._stops = stops

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        text = self._tokenizer.decode(input_ids[0, self._prompt :].tolist())
        return torch.tensor([any(stop in text for stop in self._stops)])


def shipped_draft(model: str) -> str:
    """The draft that comes with a built-in model; empty where there is none."""
    return next((d.name for d in BUILTIN_DRAFTS.values() if d.target == model and d.packed.is_file()), "")


def _resolved(model: str) -> Path:
    try:
        return resolve_model(model).path
    except ModelError as error:
        raise NotMeasured(str(error)) from error


def _load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
    ).eval()


def _until(tokenizer: ChatTokenizer, ids: list[int], stops: Sequence[str]) -> list[int]:
    """Without what came behind a stop string: assisted generation may go beyond it by the rest of a guess."""
    for end in range(1, len(ids)):
        if any(stop in tokenizer.decode(ids[:end]) for stop in stops):
            return ids[:end]
    return ids


def _cut(text: str, stops: Sequence[str]) -> str:
    for stop in stops:
        text = text.partition(stop)[0]
    return text


def _rotated(modes: list[str], by: int) -> list[str]:
    """Every mode comes first in turn."""
    by %= len(modes)
    return [*modes[by:], *modes[:by]]


def _ratios(rates: Sequence[float], plain: Sequence[float]) -> list[float]:
    return [ours / theirs for ours, theirs in zip(rates, plain, strict=True) if ours and theirs]
