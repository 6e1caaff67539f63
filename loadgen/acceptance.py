"""How often a drafter that shares the target's sampling noise guesses right, beside the best that any drafter could.

`python -m loadgen.acceptance` takes the default model's distributions at positions of a real text as the target, and
worse versions of them as drafters. A drafter with distribution q is right at most sum(min(p, q)) of the time, however
it is coupled; shared Gumbel noise assures sum(min(p, q)) / sum(max(p, q)) (Daliri, Musco, Suresh 2024).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from shared.engine import EngineConfig
from shared.engine.batch import SequenceRows
from shared.engine.runner import ModelRunner
from shared.engine.sampler import candidates, choose_token
from shared.models import resolve_model
from shared.protocol.jobs import SamplingParams

WINDOWS = (8, 32, 128)
"""Tokens of context that the short-sighted drafters see."""

UNIGRAM_SHARE = 0.3

SAMPLING = {
    "temperature 1": SamplingParams(max_tokens=1, seed=0),
    "temperature 0.7, top-p 0.9": SamplingParams(max_tokens=1, seed=0, temperature=0.7, top_p=0.9),
}

README = Path(__file__).resolve().parent.parent / "README.md"

Rows = NDArray[np.float32]


class Pair(msgspec.Struct, frozen=True):
    """Means over the positions, as shares of 1. `independent` is a drafter that draws its own noise."""

    drafter: str
    sampling: str
    best_possible: float
    coupled: float
    assured: float
    independent: float


def drafters(runner: ModelRunner, tokens: list[int], positions: list[int], target: Rows) -> dict[str, Rows]:
    """Logits [positions, vocabulary] of each drafter."""
    found = {f"last {n} tokens of context": _windows(runner, tokens, positions, n) for n in WINDOWS}
    step = np.abs(target).max(axis=1, keepdims=True) / 127
    found["logits rounded to int8"] = np.round(target / step) * step
    found["temperature 1.3 times higher"] = target / np.float32(1.3)
    counts = np.bincount(tokens, minlength=target.shape[1]) + 0.1
    share = _softmax(target) * (1 - UNIGRAM_SHARE) + UNIGRAM_SHARE * counts / counts.sum()
    found[f"{UNIGRAM_SHARE:.0%} unigram"] = np.log(share).astype(np.float32)
    return found


def _softmax(logits: Rows) -> NDArray[np.float64]:
    weights = np.exp(np.subtract(logits, logits.max(axis=1, keepdims=True), dtype=np.float64))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _windows(runner: ModelRunner, tokens: list[int], positions: list[int], length: int) -> Rows:
    """Logits behind `tokens[:position]` for each position, of a model that sees only its last `length` tokens."""
    rows = []
    for position in positions:
        window = tokens[max(0, position - length) : position]
        rows.append(runner.forward([SequenceRows(window, 0, _blocks(runner, len(window)), 1)])[0].copy())
    return np.stack(rows)


def _target(runner: ModelRunner, tokens: list[int], positions: list[int]) -> Rows:
    """Logits behind `tokens[:position]` with the whole context."""
    rows, done = [], 0
    blocks = _blocks(runner, len(tokens))
    for position in positions:
        rows.append(runner.forward([SequenceRows(tokens[done:position], done, blocks, 1)])[0].copy())
        done = position
    return np.stack(rows)


def _blocks(runner: ModelRunner, tokens: int) -> list[int]:
    return list(range(-(-tokens // runner.layout.block_tokens)))


def measure(drafter: str, sampling: str, target: Rows, drafts: Rows, draws: int) -> Pair:
    """Draw `draws` times at each position with both distributions and one noise."""
    params = SAMPLING[sampling]
    best, assured, independent, hits = [], [], [], 0
    for index, (ours, theirs) in enumerate(zip(target, drafts, strict=True)):
        p, q = _probabilities(ours, params), _probabilities(theirs, params)
        best.append(np.minimum(p, q).sum())
        assured.append(best[-1] / np.maximum(p, q).sum())
        independent.append((p * q).sum())
        for seed in range(draws):
            seeded = msgspec.structs.replace(params, seed=seed)
            hits += choose_token(ours, seeded, index) == choose_token(theirs, seeded, index)
    means = (float(np.mean(values)) for values in (best, assured, independent))
    best_possible, least, apart = means
    return Pair(drafter, sampling, best_possible, hits / (draws * len(target)), least, apart)


def _probabilities(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float64]:
    ids, scaled = candidates(logits, params)
    found = np.zeros(len(logits))
    found[ids] = np.exp(scaled)
    return np.asarray(found / found.sum())


def main(
    model: Annotated[str, typer.Option(help="A name that HEADRACE_MODEL takes")] = "smollm2-135m-instruct",
    text: Annotated[Path, typer.Option(help="Text whose positions are looked at", exists=True)] = README,
    positions: Annotated[int, typer.Option(min=1, help="Positions drawn from the text")] = 100,
    draws: Annotated[int, typer.Option(min=1, help="Draws at each position")] = 50,
    context: Annotated[int, typer.Option(min=256, help="Tokens of the text that are used")] = 1024,
    json: Annotated[Path | None, typer.Option(help="Write the results to this file")] = None,
) -> None:
    """Measure all pairs and print a table."""
    files = resolve_model(model)
    runner = ModelRunner.load(
        EngineConfig(
            model_path=files.path, model_name=files.name, fingerprint=files.fingerprint, kv_memory_bytes=1 << 28
        )
    )
    tokens = Tokenizer.from_file(str(files.path / "tokenizer.json")).encode(text.read_text()).ids[:context]
    chosen = sorted(random.Random(1).sample(range(1, len(tokens) + 1), min(positions, len(tokens))))
    target = _target(runner, tokens, chosen)
    pairs = [
        measure(name, sampling, target, rows, draws)
        for name, rows in drafters(runner, tokens, chosen, target).items()
        for sampling in SAMPLING
    ]
    table = Table("drafter", "sampling", "best possible", "coupled", "of it", "assured", "independent")
    for pair in pairs:
        shares = (pair.best_possible, pair.coupled, pair.coupled / pair.best_possible, pair.assured, pair.independent)
        table.add_row(pair.drafter, pair.sampling, *(f"{share:.1%}" for share in shares))
    Console().print(f"{files.name}, {len(chosen)} positions of {text.name}, {draws} draws each")
    Console().print(table)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(pairs), indent=2))


if __name__ == "__main__":
    typer.run(main)
