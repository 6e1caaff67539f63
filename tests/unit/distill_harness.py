"""Tiny targets for the tests of distillation: random weights, byte-level tokens, with or without a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from services.draft.distill.corpus import Text
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
