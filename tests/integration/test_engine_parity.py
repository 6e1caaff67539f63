"""The default model against Transformers' `generate`, token for token, on more than a hundred prompts.

`make test-parity` runs it. It takes about 20 minutes on one core; with HEADRACE_PARITY_PROMPTS=5, five of
the prompts, spread over all.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from shared.engine import Engine, EngineConfig, SequenceStep
from shared.models import ChatTokenizer, resolve_model
from tests.integration.parity_prompts import parity_prompts
from tests.unit.engine_harness import begin, greedy, outputs

MODEL = "smollm2-135m-instruct"
NEAR_TIE = 1e-3
NEAR_TIE_SHARE = 0.01

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]


@pytest.fixture(scope="module")
def model_path() -> Path:
    return resolve_model(MODEL).path


@pytest.fixture(scope="module")
def prompts(model_path: Path) -> dict[str, list[int]]:
    found = parity_prompts(ChatTokenizer.load(model_path))
    wanted = int(os.environ.get("HEADRACE_PARITY_PROMPTS", len(found)))
    assert 1 <= wanted <= len(found)
    names = list(found)
    return {names[i * len(names) // wanted]: found[names[i * len(names) // wanted]] for i in range(wanted)}


def load(path: Path, dtype: str) -> Engine:
    return Engine.load(
        EngineConfig(
            model_path=path,
            model_name="default",
            fingerprint="f",
            kv_memory_bytes=768 << 20,
            dtype=dtype,  # type: ignore[arg-type]
        )
    )


def reference(path: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # every answer gets its full length
    model.generation_config.pad_token_id = 0
    return model


def compare(engine: Engine, theirs: Any, prompts: dict[str, list[int]], new_tokens: int) -> None:
    """All prompts run through the engine at once, then one by one through `theirs`.

    Prints each near-tie that flipped, with the gap of its two logits, and fails on too wide or too many of them.
    """
    for name, prompt in prompts.items():
        begin(engine, name, prompt, greedy(new_tokens))
    steps: list[SequenceStep] = []
    while engine.has_work:
        done = engine.step()
        assert done, "nothing can run"
        steps += done
        for step in done:
            if step.finish_reason is not None:
                engine.release(step.seq_id)
    found = outputs(steps)
    near_ties: list[float] = []
    for name, prompt in prompts.items():
        batch = torch.tensor([prompt])
        mask = torch.ones_like(batch)
        answer = theirs.generate(batch, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
        expected = answer[0, len(prompt) :].tolist()
        assert len(expected) == len(found[name]) == new_tokens
        if found[name] == expected:
            print(f"{name}: equal", flush=True)
            continue
        at = next(i for i in range(new_tokens) if found[name][i] != expected[i])
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + expected[:at]])).logits[0, -1]
        near_ties.append(float(logits[expected[at]] - logits[found[name][at]]))
        print(f"{name}: near-tie at output token {at}, gap {near_ties[-1]:.2e}", flush=True)
    print(f"{len(prompts)} prompts of {new_tokens} new tokens, {len(near_ties)} near-ties: {near_ties}", flush=True)
    assert all(gap <= NEAR_TIE for gap in near_ties)
    assert len(near_ties) <= max(1, NEAR_TIE_SHARE * len(prompts))


def test_the_default_model_gives_the_tokens_of_transformers(model_path: Path, prompts: dict[str, list[int]]) -> None:
    compare(load(model_path, "fp32"), reference(model_path), prompts, 128)


def test_packed_weights_give_the_tokens_of_transformers_with_weights_and_kv_rounded_to_fp16(
    model_path: Path, prompts: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else is rounded. A tenth of the prompts."""
    plain_update = transformers.DynamicCache.update

    def update(cache: Any, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return plain_update(cache, key.half().float(), value.half().float(), *args, **kwargs)

    monkeypatch.setattr(transformers.DynamicCache, "update", update)
    theirs = reference(model_path)
    theirs.lm_head.weight = nn.Parameter(theirs.lm_head.weight.detach().clone())  # it shares the embedding's otherwise
    for module in theirs.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.half().float()
    some = {name: prompt for number, (name, prompt) in enumerate(prompts.items()) if number % 10 == 3}
    compare(load(model_path, "fp16-packed"), theirs, some or prompts, 64)
