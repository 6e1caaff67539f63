"""The corpus on disk: texts in bounded safetensors files, each written whole or not at all.

Not here: what is written (`conversations`) and who writes it (`generation`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from services.draft.distill.conversations import Role
from services.draft.distill.errors import DistillError
from services.draft.distill.recipe import CorpusRecipe

SHARD_TEXTS = 64
SHARD_AGE_S = 45.0
"""A shard is written when it holds so many texts, or its first one waits for so long: what a kill may cost."""

_ROLES: Final[tuple[Role, ...]] = ("user", "answer")


@dataclass(frozen=True)
class WrittenTurn:
    """Tokens `first .. end` of a text, chosen by the target at `temperature` with the noise of `seed`."""

    role: Role
    first: int
    end: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class Text:
    """Text `number` of the corpus.

    `tokens` [n]; `made` [n] tells those that the target chose, of which there are m. For these `top_ids` [m, top] and
    `top_logprobs` [m, top] are its likeliest tokens, best first, at temperature 1; where it had fewer, -inf stands.
    """

    number: int
    tokens: NDArray[np.int32]
    made: NDArray[np.bool_]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float16]
    turns: tuple[WrittenTurn, ...]

    @property
    def num_made(self) -> int:
        return len(self.top_ids)


class Corpus:
    """The texts that are on disk or about to be. One process may write at a time (see `command`)."""

    def __init__(self, directory: Path, recipe: CorpusRecipe, numbers: Callable[[], Iterator[int]]) -> None:
        """`numbers` begins anew to tell, without end, which texts belong here, in order.

        Raises DistillError when the directory holds a corpus of another recipe.
        """
        self._directory = directory
        self.numbers = numbers
        directory.mkdir(parents=True, exist_ok=True)
        self._claim(recipe)
        self._pending: list[Text] = []
        self._pending_since_s = 0.0
        self._made: dict[int, int] = {}
        """Tokens that the target made, by text."""
        self.cpu_seconds = 0.0
        """Spent by this process and its predecessors on what is on disk."""
        for texts, cpu_seconds in self._shards():
            self._made.update((text.number, text.num_made) for text in texts)
            self.cpu_seconds += cpu_seconds
        self._counted_s = time.process_time()
        self._next_shard = 1 + max((int(p.stem.rpartition("-")[2]) for p in directory.glob("texts-*.*")), default=-1)

    def __contains__(self, number: int) -> bool:
        return number in self._made

    @property
    def num_made(self) -> int:
        """Tokens that the target made, in all texts."""
        return sum(self._made.values())

    def made_of(self, number: int) -> int:
        return self._made[number]

    def add(self, text: Text) -> None:
        """The text is on disk after the next `flush`, at the latest SHARD_AGE_S later if texts keep coming."""
        if not self._pending:
            self._pending_since_s = time.monotonic()
        self._pending.append(text)
        self._made[text.number] = text.num_made
        if len(self._pending) >= SHARD_TEXTS or time.monotonic() - self._pending_since_s > SHARD_AGE_S:
            self.flush()

    def flush(self) -> None:
        if not self._pending:
            return
        now_s = time.process_time()
        arrays = _pack(self._pending) | {"cpu_seconds": np.array([now_s - self._counted_s])}
        write_whole(self._directory / f"texts-{self._next_shard:05d}.safetensors", save(arrays))
        self._next_shard += 1
        self._pending = []
        self.cpu_seconds += now_s - self._counted_s
        self._counted_s = now_s

    def first_texts(self, tokens: int) -> list[int] | None:
        """The numbers of the first texts that together hold `tokens` made tokens; None while one of them is missing."""
        found, made = [], 0
        for number in self.numbers():
            if made >= tokens:
                break
            if number not in self._made:
                return None
            found.append(number)
            made += self._made[number]
        return found

    def read(self, numbers: Collection[int]) -> list[Text]:
        """Texts from disk, in the order asked for."""
        wanted = set(numbers)
        found = {text.number: text for texts, _ in self._shards() for text in texts if text.number in wanted}
        return [found[number] for number in numbers]

    def _claim(self, recipe: CorpusRecipe) -> None:
        path = self._directory / "recipe.json"
        wanted = msgspec.json.format(msgspec.json.encode(recipe), indent=2)
        if not path.exists():
            write_whole(path, wanted)
        elif path.read_bytes() != wanted:
            raise DistillError(
                f"{self._directory} holds text of another target, seed or prompts; give another --out, or delete it"
            )

    def _shards(self) -> Iterator[tuple[list[Text], float]]:
        """Texts and the CPU time that they took, in the order of writing."""
        for path in sorted(self._directory.glob("texts-*.safetensors")):
            try:
                arrays = load_file(path)
                shard = _unpack(arrays), float(arrays["cpu_seconds"][0])
            except (SafetensorError, KeyError, ValueError) as error:
                raise DistillError(f"{path} is damaged ({error}); delete it, and its texts are made again") from error
            yield shard


def write_whole(path: Path, data: bytes) -> None:
    """Readers see the old content or the new, whatever dies when."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    with unfinished.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
    with contextlib.suppress(OSError):  # some file systems cannot
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _pack(texts: list[Text]) -> dict[str, NDArray[np.generic]]:
    return {
        "number": np.array([t.number for t in texts], np.int64),
        "length": np.array([len(t.tokens) for t in texts], np.int64),
        "num_turns": np.array([len(t.turns) for t in texts], np.int64),
        "tokens": np.concatenate([t.tokens for t in texts]),
        "made": np.concatenate([t.made for t in texts]),
        "top_ids": np.concatenate([t.top_ids for t in texts]),
        "top_logprobs": np.concatenate([t.top_logprobs for t in texts]),
        "turns": np.array([_numbers_of(turn) for t in texts for turn in t.turns], np.int64).reshape(-1, 4),
        "temperatures": np.array([turn.temperature for t in texts for turn in t.turns], np.float64),
    }


def _numbers_of(turn: WrittenTurn) -> tuple[int, int, int, int]:
    return _ROLES.index(turn.role), turn.first, turn.end, turn.seed


def _unpack(arrays: dict[str, NDArray[np.generic]]) -> list[Text]:
    lengths = arrays["length"]
    ends = np.cumsum(lengths)[:-1]
    made = np.split(arrays["made"].astype(np.bool_), ends)
    made_ends = np.cumsum([m.sum() for m in made])[:-1]
    turn_ends = np.cumsum(arrays["num_turns"])[:-1]
    columns = (
        arrays["number"],
        np.split(arrays["tokens"].astype(np.int32), ends),
        made,
        np.split(arrays["top_ids"].astype(np.int32), made_ends),
        np.split(arrays["top_logprobs"].astype(np.float16), made_ends),
        np.split(arrays["turns"], turn_ends),
        np.split(arrays["temperatures"], turn_ends),
    )
    texts = []
    for number, tokens, made_here, top_ids, top_logprobs, turns, temperatures in zip(*columns, strict=True):
        written = tuple(
            WrittenTurn(_ROLES[int(role)], int(first), int(end), float(temperature), int(seed))
            for (role, first, end, seed), temperature in zip(turns, temperatures, strict=True)
        )
        texts.append(Text(int(number), tokens, made_here, top_ids, top_logprobs, written))
    return texts
