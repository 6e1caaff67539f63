"""Tiny targets for the tests of distillation: random weights, byte-level tokens, with or without a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from services.draft.distill.corpus import Text
from services.draft.distill.recipe import CorpusRecipe, TrainingRecipe
from services.draft.distill.student import make_student
from services.draft.distill.training import Trainer
from tests.unit.engine_harness import EOS, tiny_model

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    + EOS
    + "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def chat_target(path: Path, **changes: Any) -> Path:
    """A target whose turns end with its end-of-text token."""
    tiny_model(path, **({"num_hidden_layers": 4, "max_position_embeddings": 256} | changes))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def plain_target(path: Path, **changes: Any) -> Path:
    tiny_model(path, **({"num_hidden_layers": 4, "max_position_embeddings": 256} | changes))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    return path


def written() -> list[Text]:
    """One short text that a target may have written: what is counted in it matters to nobody."""
    tokens = np.arange(12, dtype=np.int32)
    made = np.arange(12) >= 3
    return [Text(0, tokens, made, np.zeros((9, 1), np.int32), np.zeros((9, 1), np.float16), ())]


LENGTH, MADE, TOP = 24, 20, 4


def texts_to_learn() -> list[Text]:
    """Dozen texts of random tokens, of each of which the target gave half of its probability to what came."""
    random = np.random.default_rng(5)
    found = []
    for number in range(12):
        tokens = random.integers(0, 250, LENGTH, dtype=np.int32)
        made = np.arange(LENGTH) >= LENGTH - MADE
        ids = np.stack([tokens[made], *random.integers(0, 250, (TOP - 1, MADE), dtype=np.int32)], 1)
        logprobs = np.log(np.tile([0.5, 0.2, 0.1, 0.1], (MADE, 1))).astype(np.float16)
        found.append(Text(number, tokens, made, ids, logprobs, ()))
    return found


def trainer(target: Path, texts: list[Text], checkpoint: Path, device: str = "cpu") -> Trainer:
    """For a handful of steps."""
    corpus = CorpusRecipe("t", "f", "fp32", 3)
    recipe = TrainingRecipe(corpus, MADE * len(texts), [0, 3], 2, batch_tokens=3 * LENGTH, warmup=2)
    return Trainer(make_student(target, [0, 3], device), texts, [], recipe, checkpoint)
