"""Fits the student to the target's distribution over the corpus. Killed at any moment, it goes on from the last minute.

The state of a run is one safetensors file: parameters, the optimiser's moments, and the step in its metadata. All else,
batches and random columns, follows from the recipe and the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from services.draft.distill.acceptance import Accepted, of_student
from services.draft.distill.corpus import Text, write_whole
from services.draft.distill.errors import DistillError
from services.draft.distill.loss import choose_columns, distillation_loss
from services.draft.distill.recipe import TrainingRecipe
from services.draft.distill.schedule import batches, learning_rate
from services.draft.distill.student import Student

ALWAYS, OTHERS = 16_384, 4096
"""Columns of the head in every step: the tokens that the target gives most to over the corpus, and random others."""

CHECKPOINT_S = 60.0
_LOOKS = 10
"""Times that held-out acceptance is measured on the way, on this many positions of each kind."""
_LOOK_POSITIONS = 1000


class Progress(msgspec.Struct, frozen=True):
    """Behind `step` of `steps` steps; `loss` is the mean divergence of the last steps, in nats a token."""

    step: int
    steps: int
    loss: float
    accepted: Accepted | None


class _State(msgspec.Struct, frozen=True):
    """What the metadata of a checkpoint tells."""

    recipe: str
    step: int
    loss: float
    cpu_seconds: float
    accepted: Accepted | None = None


@dataclass(frozen=True)
class _Batch:
    """`tokens` [texts, length], padded. Of the flattened positions those in `rows` [n] are followed by a made token."""

    tokens: NDArray[np.int64]
    rows: NDArray[np.int64]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]
    chosen: NDArray[np.int32]


class Trainer:
    """One training run over `texts`, of which none is held out; `held_out` are those to look at on the way."""

    def __init__(
        self,
        student: Student,
        texts: Sequence[Text],
        held_out: Sequence[Text],
        recipe: TrainingRecipe,
        checkpoint: Path,
    ) -> None:
        """Raises DistillError when there is nothing to train on."""
        self._student = student
        self._texts = texts
        self._held_out = held_out
        self._recipe = recipe
        self._checkpoint = checkpoint
        self._batches = batches(
            [len(text.tokens) for text in texts], recipe.epochs, recipe.batch_tokens, recipe.corpus.seed
        )
        if not self._batches:
            raise DistillError("the corpus has no text to train on; ask for more --tokens")
        vocabulary = student.head.shape[0]
        self._always = likeliest(texts, vocabulary, ALWAYS)
        self._optimiser = torch.optim.AdamW(
            list(student.trained.values()), lr=0.0, betas=(0.9, 0.95), weight_decay=recipe.weight_decay, fused=True
        )
        self.state = _State(recipe.digest, 0, 0.0, 0.0)
        self._in_step = False
        """Weights may be those of the step behind the one that `state` names."""
        self._restore()

    @property
    def steps(self) -> int:
        return len(self._batches)

    def run(self, report: Callable[[Progress], None]) -> None:
        """To the end, from where the checkpoint stood if there was one of this recipe."""
        saved_s = time.monotonic()
        before_s = self.state.cpu_seconds - time.process_time()
        step = self.state.step
        try:
            while step < self.steps:
                loss = self._step(step)
                step += 1
                smoothed = loss if step == 1 else self.state.loss + (loss - self.state.loss) / min(step, 50)
                self.state = msgspec.structs.replace(
                    self.state, step=step, loss=smoothed, cpu_seconds=before_s + time.process_time()
                )
                self._in_step = False
                if step == self.steps or step * _LOOKS // self.steps > (step - 1) * _LOOKS // self.steps:
                    accepted = of_student(self._student, self._held_out, _LOOK_POSITIONS)
                    self.state = msgspec.structs.replace(self.state, accepted=accepted)
                report(Progress(step, self.steps, smoothed, self.state.accepted))
                if time.monotonic() - saved_s > CHECKPOINT_S:
                    self._save()
                    saved_s = time.monotonic()
        finally:
            if not self._in_step:  # else the step would be made twice; the last checkpoint is whole
                self._save()

    def _step(self, number: int) -> float:
        student, recipe = self._student, self._recipe
        batch = _batch_of([self._texts[i] for i in self._batches[number]])
        device = student.head.device
        random = np.random.default_rng([recipe.corpus.seed, number, 1])
        needed = np.concatenate([batch.top_ids.ravel(), batch.chosen])
        columns = choose_columns(needed, self._always, student.head.shape[0], OTHERS, random)
        with torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bf16"):
            hidden = student.hidden(torch.from_numpy(batch.tokens).to(device)).flatten(0, 1)
            rows = hidden.index_select(0, torch.from_numpy(batch.rows).to(device))
            head = student.head.index_select(0, torch.from_numpy(columns.ids).to(device))
            logits = rows @ head.T
        loss, divergence = distillation_loss(
            logits.float() + torch.from_numpy(columns.log_weights).to(device),
            torch.from_numpy(columns.places(batch.top_ids)).to(device),
            torch.from_numpy(batch.top_logprobs).to(device),
            torch.from_numpy(columns.places(batch.chosen)).to(device),
            recipe.hard_share,
        )
        for group in self._optimiser.param_groups:
            group["lr"] = learning_rate(number, self.steps, recipe.learning_rate, recipe.warmup)
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(student.trained.values(), recipe.clip)
        found = float(divergence)  # on a GPU all of the step's work before this is waited for here
        self._in_step = True
        self._optimiser.step()
        return found

    # Checkpoints

    def _save(self) -> None:
        tensors = {f"weight/{name}": p.detach() for name, p in self._student.trained.items()}
        for name, parameter in self._student.trained.items():
            for moment, value in self._optimiser.state[parameter].items():
                tensors[f"{moment}/{name}"] = value
        metadata = {"state": msgspec.json.encode(self.state).decode()}
        write_whole(self._checkpoint, save({k: v.cpu().contiguous() for k, v in tensors.items()}, metadata))

    def _restore(self) -> None:
        if not self._checkpoint.exists():
            return
        try:
            with safe_open(self._checkpoint, framework="pt") as saved:
                state = msgspec.json.decode(saved.metadata()["state"], type=_State)
                if state.recipe != self._recipe.digest:
                    return  # of another training on the same corpus; overwritten by this one
                for name in saved.keys():  # noqa: SIM118 (no mapping)
                    kind, _, of = name.partition("/")
                    parameter = self._student.trained[of]
                    if kind == "weight":
                        parameter.data.copy_(saved.get_tensor(name))
                    else:
                        # The fused optimiser counts its steps where it computes them.
                        self._optimiser.state[parameter][kind] = saved.get_tensor(name).to(parameter.device)
        except (SafetensorError, KeyError, msgspec.MsgspecError) as error:
            raise DistillError(f"{self._checkpoint} is damaged ({error}); delete it to train from the start") from error
        self.state = state


def quickest_precision(device: str) -> Literal["fp32", "bf16"]:
    """bf16 where the processor multiplies in it; elsewhere torch would emulate that."""
    native = device == "cuda" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if native else "fp32"


def likeliest(texts: Sequence[Text], vocabulary: int, count: int) -> NDArray[np.int64]:
    """The `count` tokens that the target gave most probability to, over all texts; ascending."""
    mass = np.zeros(vocabulary)
    for text in texts:
        mass += np.bincount(text.top_ids.ravel(), np.exp(text.top_logprobs.ravel(), dtype=np.float64), vocabulary)
    return np.sort(np.argsort(-mass, kind="stable")[:count])


def _batch_of(texts: Sequence[Text]) -> _Batch:
    length = max(len(text.tokens) for text in texts)
    tokens = np.zeros((len(texts), length), np.int64)
    rows = []
    for index, text in enumerate(texts):
        tokens[index, : len(text.tokens)] = text.tokens
        rows.append(index * length + np.flatnonzero(text.made) - 1)
    return _Batch(
        tokens=tokens,
        rows=np.concatenate(rows),
        top_ids=np.concatenate([text.top_ids for text in texts]),
        top_logprobs=np.concatenate([text.top_logprobs for text in texts]).astype(np.float32),
        chosen=np.concatenate([text.tokens[text.made] for text in texts]),
    )
