"""What the target is asked to write: a function of seed and number, shaped by the chat template."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from services.draft.distill.conversations import ANSWER_TOKENS, USER_TOKENS, Markup, Script
from services.draft.distill.errors import DistillError
from shared.models import ChatTokenizer
from tests.unit.distill_harness import chat_target, plain_target
from tests.unit.engine_harness import EOS


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer.load(chat_target(tmp_path_factory.mktemp("chat")))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer.load(plain_target(tmp_path_factory.mktemp("plain")))


def script(tokenizer: ChatTokenizer, **changes: object) -> Script:
    return Script.of(tokenizer, **{"seed": 5, "max_length": 256, "top": 4} | changes)  # type: ignore[arg-type]


def test_the_template_is_taken_apart_where_the_contents_stand(chat: ChatTokenizer) -> None:
    markup = Markup.of(chat)
    assert markup is not None
    assert chat.decode(markup.opening) == "u:"
    assert chat.decode(markup.before_answer, skip_special_tokens=False) == EOS + "a:"
    assert chat.decode(markup.before_question, skip_special_tokens=False) == EOS + "u:"
    assert markup.question_ends == [chat.raw.token_to_id(EOS)]


def test_the_pieces_make_the_prompt_that_the_gateway_makes(chat: ChatTokenizer) -> None:
    markup = Markup.of(chat)
    assert markup is not None
    put_together = [*markup.opening, *chat.encode("hello all"), *markup.before_answer]
    assert put_together == chat.render_chat([{"role": "user", "content": "hello all"}])


def test_a_template_that_leaves_messages_out_is_refused(tmp_path: Path) -> None:
    path = chat_target(tmp_path)
    (path / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    with pytest.raises(DistillError, match="leaves messages out"):
        Markup.of(ChatTokenizer.load(path))


def test_a_text_depends_on_seed_and_number_alone(chat: ChatTokenizer) -> None:
    assert script(chat).begin(7) == script(chat).begin(7)
    assert script(chat).begin(7) != script(chat).begin(8)
    assert script(chat).begin(7) != script(chat, seed=6).begin(7)


def test_a_chat_takes_turns_and_ends_with_an_answer(chat: ChatTokenizer) -> None:
    rounds, temperatures, longest = set(), set(), set()
    for number in range(200):
        _, turns = script(chat).begin(number)
        assert [turn.role for turn in turns] == ["user", "answer"] * (len(turns) // 2)
        assert all(turn.params.max_tokens == USER_TOKENS for turn in turns[::2])
        longest |= {turn.params.max_tokens for turn in turns[1::2]}
        assert all(turn.params.temperature == 1 for turn in turns[::2])
        rounds.add(len(turns) // 2)
        temperatures |= {turn.params.temperature for turn in turns[1::2]}
    assert rounds == {1, 2, 3, 4}
    assert temperatures == {0.0, 0.7, 1.0}
    assert ANSWER_TOKENS[0] <= min(longest) < 70
    assert 480 < max(longest) <= ANSWER_TOKENS[1]


def test_given_prompts_begin_the_texts_in_turn(chat: ChatTokenizer) -> None:
    asked = script(chat, prompts=["hello", "STOP", "all", "he"])
    for number, prompt in enumerate(["hello", "STOP", "all", "he", "hello"]):
        tokens, turns = asked.begin(number)
        assert tokens == chat.render_chat([{"role": "user", "content": prompt}])
        assert turns[0].role == "answer"
    assert asked.begin(0)[1] != asked.begin(4)[1]  # other noise


def test_a_text_is_held_out_or_learnt_from_and_all_of_a_prompt_alike(chat: ChatTokenizer) -> None:
    asked = script(chat, prompts=[f"prompt {i}" for i in range(30)])
    held_out = list(itertools.islice(asked.numbers(held_out=True), 20))
    learnt = list(itertools.islice(asked.numbers(held_out=False), 280))
    assert sorted([*held_out, *learnt]) == list(range(300))
    assert {number % 30 for number in held_out} == {3, 27}


def test_without_a_template_the_target_writes_plain_text_from_its_first_token(plain: ChatTokenizer) -> None:
    tokens, turns = script(plain).begin(0)
    assert tokens == [plain.raw.token_to_id(EOS)]
    assert [turn.role for turn in turns] == ["answer"]
    tokens, turns = script(plain, prompts=["hello", "STOP", "all", "he"]).begin(0)
    assert tokens == plain.encode("hello")
    assert [turn.role for turn in turns] == ["answer"]


def test_a_turn_is_cut_to_the_room_that_is_left(chat: ChatTokenizer) -> None:
    asked = script(chat)
    turn = asked.begin(0)[1][1]
    cut = asked.fits(turn, 100)
    assert cut is not None
    assert cut.params.max_tokens == 156
    assert asked.fits(turn, 200) is None


def test_prompts_that_leave_no_room_are_left_out_until_too_few_are_left(chat: ChatTokenizer) -> None:
    assert len(script(chat, prompts=["x" * 400, "hello", "STOP", "all", "he"]).prompts) == 4
    with pytest.raises(DistillError, match=r"3 of the 4 prompts leave room .* at least 4 are needed"):
        script(chat, prompts=["x" * 400, "hello", "STOP", "all"])


def test_a_template_that_fills_the_text_is_refused(chat: ChatTokenizer) -> None:
    with pytest.raises(DistillError, match="fills the 64 tokens"):
        script(chat, max_length=64)
