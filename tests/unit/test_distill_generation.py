"""The corpus is the same however many texts are written at once, and however often its writer is interrupted."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.draft.distill.conversations import Script
from services.draft.distill.corpus import Corpus, Text
from services.draft.distill.generation import Generator
from services.draft.distill.recipe import CorpusRecipe
from shared.models import ChatTokenizer
from tests.unit.distill_harness import chat_target, plain_target
from tests.unit.engine_harness import EOS, load

RECIPE = CorpusRecipe("m", "f", "fp32", 3, max_length=256, top=6)
TOKENS = 1500


@pytest.fixture(autouse=True, scope="module")
def short_turns() -> Iterator[None]:
    """So that there are many, though a random model seldom ends one by itself."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("services.draft.distill.conversations.USER_TOKENS", 25)
        patched.setattr("services.draft.distill.conversations.ANSWER_TOKENS", (30, 30))
        yield


class Interrupted(Exception):
    """Stands for a kill: nothing behind it is written."""


def write(
    model: Path,
    directory: Path,
    places: int = 8,
    stop_at: int | None = None,
    stop: type[BaseException] = Interrupted,
    recipe: CorpusRecipe = RECIPE,
) -> list[Text]:
    engine = load(model, kv_memory_bytes=8 << 20, max_running=places)
    tokenizer = ChatTokenizer.load(model)
    script = Script.of(tokenizer, seed=recipe.seed, max_length=recipe.max_length, top=recipe.top)
    corpus = Corpus(directory, recipe, functools.partial(script.numbers, held_out=recipe.held_out))
    steps = 0

    def report(_made: int) -> None:
        nonlocal steps
        steps += 1
        if steps == stop_at:
            if stop is Interrupted:
                corpus.flush = lambda: None  # type: ignore[method-assign]
            raise stop

    found = Generator(engine, script, corpus).run(TOKENS, report)
    assert not engine.has_work
    return corpus.read(found)


def same(left: list[Text], right: list[Text]) -> bool:
    return len(left) == len(right) and all(
        a.turns == b.turns
        and all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ("tokens", "made", "top_ids", "top_logprobs"))
        for a, b in zip(left, right, strict=True)
    )


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_target(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def undisturbed(chat: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Text]:
    return write(chat, tmp_path_factory.mktemp("corpus"))


def test_the_corpus_holds_what_was_asked_for_and_no_text_more(undisturbed: list[Text]) -> None:
    assert sum(t.num_made for t in undisturbed) >= TOKENS
    assert sum(t.num_made for t in undisturbed[:-1]) < TOKENS


@pytest.mark.parametrize("places", [1, 3, 16])
def test_texts_do_not_depend_on_their_neighbours(
    tmp_path: Path, chat: Path, undisturbed: list[Text], places: int
) -> None:
    assert same(write(chat, tmp_path, places), undisturbed)


def test_an_interrupted_run_goes_on_to_the_same_corpus(
    tmp_path: Path, chat: Path, undisturbed: list[Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.draft.distill.corpus.SHARD_TEXTS", 2)
    for stop_at in (150, 250, 40):
        with pytest.raises(Interrupted):
            write(chat, tmp_path, places=3, stop_at=stop_at)
    assert list(tmp_path.glob("texts-*"))
    assert same(write(chat, tmp_path), undisturbed)


def test_ctrl_c_keeps_the_texts_that_are_finished(
    tmp_path: Path, chat: Path, undisturbed: list[Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.draft.distill.corpus.SHARD_TEXTS", 1000)
    with pytest.raises(KeyboardInterrupt):
        write(chat, tmp_path, places=3, stop_at=250, stop=KeyboardInterrupt)
    assert len(list(tmp_path.glob("texts-*"))) == 1
    assert same(write(chat, tmp_path), undisturbed)


def test_turns_stand_in_the_templates_marks_as_the_gateway_would_render_them(
    chat: Path, undisturbed: list[Text]
) -> None:
    tokenizer = ChatTokenizer.load(chat)
    eos = tokenizer.raw.token_to_id(EOS)
    several = [t for t in undisturbed if len(t.turns) > 2]
    assert several
    ends = {text.tokens[turn.end - 1] == eos for text in undisturbed for turn in text.turns[:-1]}
    assert ends == {True, False}
    for text in undisturbed:
        tokens = text.tokens.tolist()
        rebuilt: list[int] = []
        for turn in text.turns:
            marks = "u:" if turn.role == "user" else "a:"
            rebuilt += tokenizer.encode(marks)
            body = tokens[turn.first : turn.end]
            rebuilt += body if body[-1] == eos or turn is text.turns[-1] else [*body, eos]
        assert rebuilt == tokens


def test_the_kept_probabilities_are_the_targets(chat: Path, undisturbed: list[Text]) -> None:
    model = AutoModelForCausalLM.from_pretrained(chat, dtype=torch.float32)
    for text in undisturbed[:6]:
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(text.tokens.astype(np.int64))[None]).logits[0]
        made = np.flatnonzero(text.made)
        expected = torch.log_softmax(logits[made - 1], 1).topk(6, 1)
        np.testing.assert_allclose(text.top_logprobs, expected.values.numpy(), atol=5e-3)
        assert (text.top_ids[:, 0] == expected.indices[:, 0].numpy()).mean() > 0.99
        for turn in text.turns:
            greedy = text.tokens[turn.first : turn.end] == text.top_ids[np.isin(made, range(turn.first, turn.end)), 0]
            assert turn.temperature > 0 or greedy.all()


def test_what_is_held_out_is_other_text(tmp_path: Path, chat: Path, undisturbed: list[Text]) -> None:
    held_out = write(chat, tmp_path, recipe=msgspec.structs.replace(RECIPE, held_out=True))
    assert not {t.number for t in held_out} & {t.number for t in undisturbed}


def test_a_model_without_a_template_writes_single_texts(tmp_path: Path) -> None:
    texts = write(plain_target(tmp_path / "plain"), tmp_path / "corpus")
    assert all(len(t.turns) == 1 and t.turns[0].first == 1 for t in texts)
