"""The student begins as layers of the target, and is an ordinary model to the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from services.draft.distill.errors import DistillError
from services.draft.distill.result import write_model
from services.draft.distill.student import make_student, student_config, target_config
from tests.unit.distill_harness import chat_target, written
from tests.unit.engine_harness import begin, drain, greedy, load, outputs, tiny_model


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma", "phi3", "olmo2", "smollm3"])
@pytest.mark.parametrize("tied", [True, False])
def test_layers_and_all_that_is_shared_are_the_targets(tmp_path: Path, kind: str, tied: bool) -> None:
    path = tiny_model(tmp_path, kind, num_hidden_layers=4, tie_word_embeddings=tied)
    target = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    student = make_student(path, [0, 3])
    target.model.layers = torch.nn.ModuleList([target.model.layers[0], target.model.layers[3]])
    tokens = torch.arange(11)[None]
    with torch.no_grad():
        expected = target(input_ids=tokens, use_cache=False).logits
        torch.testing.assert_close(student.module(input_ids=tokens).logits, expected)
    assert all(name.startswith(("model.layers.", "model.norm.")) for name in student.trained)
    assert all(parameter.requires_grad for parameter in student.trained.values())
    assert student.shared == (["model.embed_tokens.weight"] + ([] if tied else ["lm_head.weight"]))
    assert not student.head.requires_grad


def test_fields_with_an_entry_for_each_layer_keep_those_of_the_chosen(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    path = tiny_model(tmp_path, "gemma3", num_hidden_layers=4, layer_types=kinds)
    config = student_config(target_config(path), [0, 1, 2])
    assert config.layer_types == kinds[:3]
    assert config.num_hidden_layers == 3


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DistillError, match="mixture of experts"):
        make_student(tiny_model(tmp_path, "mixtral"), [0])


def test_a_head_that_does_more_than_multiply_is_refused(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "gemma2", num_hidden_layers=4, final_logit_softcapping=1.0)
    with pytest.raises(DistillError, match="does more behind its layers"):
        make_student(path, [0, 3])


def test_layers_under_names_that_are_not_known_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DistillError, match="other names"):
        make_student(tiny_model(tmp_path, "gpt2", num_hidden_layers=4), [0, 3])


def test_a_written_student_serves_and_leaves_out_nothing(tmp_path: Path) -> None:
    target = chat_target(tmp_path / "target")
    student = make_student(target, [0, 3])
    out = tmp_path / "out"
    out.mkdir()
    (out / "distill.json").write_text("of a draft that was here before")
    write_model(student, target, out, [], written())
    assert {p.name for p in out.iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
        "generation_config.json", "followers.safetensors",
    }  # fmt: skip
    assert set(load_file(out / "model.safetensors")) == {*student.trained, *student.shared}
    engine = load(out)
    begin(engine, "s", [1, 2, 3], greedy(6))
    found = outputs(drain(engine))["s"]
    tokens = [1, 2, 3]
    for _ in range(6):
        with torch.no_grad():
            tokens.append(int(student.module(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    assert found == tokens[3:]
