"""The child that converts a GGUF file: `python -m shared.models.gguf_worker FILE DIRECTORY`.

Weights are written as fp32: dequantized values (scale times quant plus minimum) do not fit fp16 exactly.
Speaks lines on stdout: `progress DONE TOTAL` and `failed REASON`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

_STEPS = 4


def main(source: Path, target: Path) -> None:
    _report(0)
    import torch  # noqa: PLC0415 (slow; the first step is reported before it)
    from gguf import GGUFReader  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    torch.set_num_threads(1)
    pre_tokenizer = _text_field(GGUFReader(source), "tokenizer.ggml.pre")
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if pre_tokenizer == "smollm":
        _split_digits(tokenizer)
    tokenizer.save_pretrained(target)
    _report(1)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    _report(2)
    # Transformers takes the loaded model for a quantized one and would refuse to save it.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    _report(3)
    model.save_pretrained(target, safe_serialization=True)
    _report(_STEPS)


def _text_field(reader: Any, key: str) -> str:
    field = reader.get_field(key)
    return str(field.contents()) if field is not None else ""


def _split_digits(tokenizer: Any) -> None:
    """This family cuts numbers into digits before its byte-level pattern; Transformers' reading of GGUF omits that."""
    from tokenizers import pre_tokenizers  # noqa: PLC0415

    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )


def _report(step: int) -> None:
    print(f"progress {step} {_STEPS}", flush=True)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
    except Exception as error:  # whatever a damaged file provokes becomes one line for the parent
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"failed {type(error).__name__}: {reason[:300]}", flush=True)
        sys.exit(1)
