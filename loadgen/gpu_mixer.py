"""Batch invariance on the device itself: texts computed whole and alone, then in random mixes, compared bit by bit."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from shared.engine.batch import SequenceRows
from shared.engine.runner import ModelRunner

_COUNTS = (1, 1, 1, 1, 2, 5, 9, 16, 17, 64, 65, 300)
"""New tokens of one sequence in a batch: decode steps, verifications, chunks of prompts."""


@dataclass(frozen=True)
class Mixed:
    """`rows` of logits and `tokens` of KV were compared; `differing` of both were not the same bits."""

    rows: int
    tokens: int
    differing: int


def mix(runner: ModelRunner, texts: list[list[int]], rounds: int, seed: int, most_rows: int) -> Mixed:
    """Feed the texts in random pieces, orders, blocks and companies, some with drafts that are wrong.

    `most_rows` bounds a batch. The cache must hold all texts at once.
    """
    rng = random.Random(seed)
    block_tokens = runner.layout.block_tokens
    need = [-(-(len(text) + 8) // block_tokens) for text in texts]
    ids = list(range(runner.cache.num_blocks))
    expected: list[torch.Tensor] = []
    kv: list[torch.Tensor] = []
    for text, count in zip(texts, need, strict=True):
        logits = runner.forward([SequenceRows(text, 0, ids[:count], len(text))])
        expected.append(torch.from_numpy(logits.copy()))
        kv.append(_kv(runner, ids[:count], len(text)))
    rows = tokens = differing = 0
    for _ in range(rounds):
        rng.shuffle(ids)
        at = 0
        blocks: list[list[int]] = []
        for count in need:
            blocks.append(ids[at : at + count])
            at += count
        runner.cache.data.fill_(3.0)  # what stands in unwritten rows must not matter
        found = _feed(runner, texts, blocks, rng, most_rows)
        for i, text in enumerate(texts):
            for position, logits_row in found[i].items():
                rows += 1
                differing += not _same(logits_row, expected[i][position])
            cached = _kv(runner, blocks[i], len(text))
            tokens += len(text)
            differing += sum(not _same(a, b) for a, b in zip(cached, kv[i], strict=True))
    return Mixed(rows, tokens, differing)


def _feed(
    runner: ModelRunner, texts: list[list[int]], blocks: list[list[int]], rng: random.Random, most_rows: int
) -> list[dict[int, torch.Tensor]]:
    """Logits by text and position, of those positions whose logits were asked for."""
    found: list[dict[int, torch.Tensor]] = [{} for _ in texts]
    done = [0] * len(texts)
    while any(n < len(t) for n, t in zip(done, texts, strict=True)):
        # Every other batch is one that a captured graph may serve: all rows' logits are wanted.
        whole = rng.random() < 0.5
        sequences: list[SequenceRows] = []
        parts: list[tuple[int, int, int]] = []
        room = rng.choice((1, 8, 60, 128, most_rows))
        for i in rng.sample(range(len(texts)), len(texts)):
            count = min(len(texts[i]) - done[i], room, rng.choice(_COUNTS))
            if count < 1:
                continue
            wrong = [rng.randrange(runner.model.vocab_size) for _ in range(min(rng.choice((0, 0, 4)), room - count))]
            wanted = count if whole else rng.choice((0, 1, min(count, 4)))
            fed = texts[i][done[i] : done[i] + count] + wrong
            sequences.append(SequenceRows(fed, done[i], blocks[i], wanted + len(wrong) if wanted else 0))
            parts.append((i, wanted, len(wrong) if wanted else 0))
            done[i] += count
            room -= len(fed)
        logits = torch.from_numpy(runner.forward(sequences).copy())
        row = 0
        for i, wanted, drafted in parts:
            for step in range(wanted):
                found[i][done[i] - wanted + step] = logits[row + step]
            row += wanted + drafted
    return found


def _kv(runner: ModelRunner, blocks: list[int], tokens: int) -> torch.Tensor:
    """[tokens, ...]: K and V of all layers, on the host."""
    data = runner.cache.data[torch.tensor(blocks, device=runner.cache.data.device)].movedim(3, 1)
    return data.reshape(-1, *data.shape[2:])[:tokens].cpu()


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
