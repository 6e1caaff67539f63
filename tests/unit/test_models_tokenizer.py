"""ChatTokenizer on small tokenizers written here: templates, end-of-sequence ids, bounds, and no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from shared.models import ChatTokenizer, ModelUnusable, TemplateError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße, 猫! <b>"},
    {"role": "assistant", "content": "yes"},
    {"role": "tool", "content": "42"},
]


def write_model(
    directory: Path,
    *,
    config: dict[str, Any] | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    template: str | None = CHATML,
) -> Path:
    """A byte-level tokenizer of 256 bytes and four special tokens, ids 256 to 259."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={char: n for n, char in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    raw.add_special_tokens([AddedToken(text, special=True) for text in special])
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    raw.save(str(directory / "tokenizer.json"))
    config = {"vocab_size": 300, "max_position_embeddings": 512, "eos_token_id": 259} if config is None else config
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config or {"eos_token": "<|im_end|>"}))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def test_a_conversation_is_rendered_by_the_models_own_template_and_ends_where_the_answer_begins(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.load(write_model(tmp_path))
    text = tokenizer.render_text(CONVERSATION)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGrüße, 猫! <b><|im_end|>\n"
        "<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.render_chat(CONVERSATION)
    assert ids[0] == 257
    assert 256 not in ids, "the template writes its own markers; no second BOS is put in front"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_plain_text_gets_the_models_leading_marker_and_survives_the_round_trip(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.load(write_model(tmp_path))
    ids = tokenizer.encode("naïve 猫\n")
    assert ids[0] == 256
    assert tokenizer.decode(ids) == "naïve 猫\n"
    assert tokenizer.encode("a", add_special_tokens=False) == ids[:0] + tokenizer.encode("a")[1:]


def test_every_file_that_names_an_end_of_sequence_is_believed(tmp_path: Path) -> None:
    write_model(tmp_path, generation={"eos_token_id": [257, 258]}, tokenizer_config={"eos_token": {"content": "<s>"}})
    assert ChatTokenizer.load(tmp_path).eos_token_ids == {256, 257, 258, 259}


def test_bounds_come_from_the_config_even_when_it_nests_the_text_model(tmp_path: Path) -> None:
    nested = {"text_config": {"vocab_size": 1000, "max_position_embeddings": 64}}
    tokenizer = ChatTokenizer.load(write_model(tmp_path, config=nested))
    assert (tokenizer.vocab_size, tokenizer.context_length) == (1000, 64)


@pytest.mark.parametrize(
    "stored",
    [CHATML, [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]],
    ids=["text", "named list"],
)
def test_a_template_inside_tokenizer_config_is_found(tmp_path: Path, stored: object) -> None:
    write_model(tmp_path, template=None, tokenizer_config={"chat_template": stored})
    assert (
        ChatTokenizer.load(tmp_path).render_text([{"role": "user", "content": "x"}]).startswith("<|im_start|>user\nx")
    )


def test_a_template_may_use_what_other_runtimes_offer(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{% generation %}{{ strftime_now('%Y') | length }}{% endgeneration %}{{ eos_token }}"
    )
    tokenizer = ChatTokenizer.load(write_model(tmp_path, template=template))
    expected = '{"role": "user", "content": "<é>"}4<|im_end|>'
    assert tokenizer.render_text([{"role": "user", "content": "<é>"}] * 2) == expected


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7]['content'] }}", "refused the messages"),
        ("{{ messages.append(1) }}", "refused the messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refused the messages"),
        (None, "no chat template"),
    ],
    ids=["raises", "misses", "mutates", "escapes", "absent"],
)
def test_a_template_that_fails_or_misbehaves_is_a_template_error(
    tmp_path: Path, template: str | None, words: str
) -> None:
    tokenizer = ChatTokenizer.load(write_model(tmp_path, template=template))
    with pytest.raises(TemplateError, match=words):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("broken", ["tokenizer.json", "config.json", "chat_template.jinja"])
def test_a_damaged_file_is_named(tmp_path: Path, broken: str) -> None:
    write_model(tmp_path)
    (tmp_path / broken).write_text("{% if %}{")
    with pytest.raises(ModelUnusable, match=r"tokenizer\.json|config\.json|chat template"):
        ChatTokenizer.load(tmp_path)


def test_tokenizing_and_resolving_need_no_torch(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    program = (
        "import sys; from pathlib import Path; from shared.models import ChatTokenizer, resolve_model\n"
        "files = resolve_model(sys.argv[1])\n"
        "ChatTokenizer.load(files.path).render_chat([{'role': 'user', 'content': 'x'}])\n"
        "heavy = {'torch', 'transformers', 'gguf'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
