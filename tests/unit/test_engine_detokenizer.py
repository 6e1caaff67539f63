"""Incremental detokenization: characters stay whole, stop strings are found and never shown, replay goes on exactly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from shared.engine.detokenizer import Detokenizer
from tests.unit.engine_harness import EOS, byte_level_tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """SentencePiece-like: a word begins with U+2581, unknown characters are spelled in byte tokens."""
    vocab = {"<unk>": 0} | {f"<0x{i:02X}>": i + 1 for i in range(256)}
    for piece in ["\u2581", "\u2581a", "b", "\u2581S", "TO", "P", "STOP"]:
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


TOKENIZERS = {"byte-level": byte_level_tokenizer(), "byte-fallback": byte_fallback_tokenizer()}
BYTE_LEVEL = TOKENIZERS["byte-level"]

texts = st.text(alphabet=st.sampled_from("abhelSTOP \u00e9\u20ac\u4f60\U0001f600\ufffd"), max_size=30)
garbage = st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=120)


def ids_of(text: str) -> list[int]:
    return BYTE_LEVEL.encode(text).ids


def id_of(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None
    return found


def run(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    """What each token made visible, then what the end did; stops where a stop string was completed."""
    deltas = []
    for token in ids:
        deltas.append(detokenizer.push(token))
        if detokenizer.stopped:
            return deltas
    deltas.append(detokenizer.finish())
    return deltas


@given(texts)
def test_text_comes_out_whole_and_no_delta_splits_a_character(text: str) -> None:
    deltas = run(Detokenizer(BYTE_LEVEL, [], []), ids_of(text))
    assert "".join(deltas) == text
    shown = ""
    for delta in deltas:
        shown += delta
        assert text.startswith(shown)


@given(garbage)
def test_any_tokens_give_the_text_of_decoding_them_at_once(ids: list[int]) -> None:
    deltas = run(Detokenizer(BYTE_LEVEL, [], []), ids)
    whole = BYTE_LEVEL.decode(ids, skip_special_tokens=True)
    assert "".join(deltas) == whole
    shown = ""
    for delta in deltas:
        shown += delta
        assert whole.startswith(shown)


def test_many_undecodable_tokens_are_given_up_in_time_and_a_character_after_them_stays_whole() -> None:
    lone = ids_of("\u20ac")[1]  # a continuation byte
    detokenizer = Detokenizer(BYTE_LEVEL, [], [])
    deltas = [detokenizer.push(lone) for _ in range(200)]
    assert sum(len(d) for d in deltas) >= 200 - 40
    deltas += [detokenizer.push(t) for t in ids_of("\U0001f600")]
    assert "".join([*deltas, detokenizer.finish()]) == "\ufffd" * 200 + "\U0001f600"


@given(texts, texts, st.integers(0, 40), st.lists(st.sampled_from(["STOP", "P", "he", "ll\u20ac", "OPS"]), max_size=3))
def test_a_successor_that_replays_the_tokens_goes_on_where_the_text_stopped(
    prompt: str, text: str, cut: int, stop: list[str]
) -> None:
    ids, tail = ids_of(text), ids_of(prompt)[-8:]
    first = Detokenizer(BYTE_LEVEL, stop, tail)
    expected = run(first, ids)
    successor = Detokenizer(BYTE_LEVEL, stop, tail)
    for token in ids[:cut]:
        if successor.stopped:
            return
        successor.push(token)
    if not successor.stopped:
        assert run(successor, ids[cut:]) == expected[min(cut, len(ids)) :]


@given(
    texts, st.lists(st.sampled_from(["STOP", "P", "he", "l\u20ac", "OPS", "ab", "\U0001f600"]), min_size=1, max_size=3)
)
def test_text_ends_before_the_first_stop_string_and_never_shows_a_part_of_it(text: str, stop: list[str]) -> None:
    ids = ids_of(text)
    detokenizer = Detokenizer(BYTE_LEVEL, stop, [])
    shown = "".join(run(detokenizer, ids))
    # The reference looks at whole characters after each token and stops at the first that completes a stop string.
    for n in range(1, len(ids) + 1):
        decoded = BYTE_LEVEL.decode(ids[:n], skip_special_tokens=True)
        if n < len(ids):
            decoded = decoded.rstrip("\ufffd") if decoded.rstrip("\ufffd") != decoded else decoded
        found = [at for at in (decoded.find(s) for s in stop) if at >= 0]
        if found:
            assert detokenizer.stopped
            assert shown == decoded[: min(found)]
            return
    assert not detokenizer.stopped
    assert shown == text


@given(st.lists(st.sampled_from(["STOP", "x"]), min_size=1, max_size=12))
def test_what_may_become_a_stop_string_is_held_back_until_it_cannot(parts: list[str]) -> None:
    text = "".join(parts)
    detokenizer = Detokenizer(BYTE_LEVEL, ["STOPSTOPx"], [])
    shown = ""
    for n, token in enumerate(ids_of(text), 1):
        shown += detokenizer.push(token)
        if detokenizer.stopped:
            break
        decoded = BYTE_LEVEL.decode(ids_of(text)[:n])
        longest = max(i for i in range(len("STOPSTOPx")) if decoded.endswith("STOPSTOPx"[:i]))
        assert shown == decoded[: len(decoded) - longest]


@given(st.lists(st.integers(1, TOKENIZERS["byte-fallback"].get_vocab_size() - 1), max_size=20))
def test_byte_fallback_replays_exactly_and_shows_no_unfinished_character(ids: list[int]) -> None:
    tokenizer = TOKENIZERS["byte-fallback"]
    tail = [id_of(tokenizer, "\u2581a")]
    whole = run(Detokenizer(tokenizer, [], tail), ids)
    assert not any(delta.endswith("\ufffd") for delta in whole[:-1])
    successor = Detokenizer(tokenizer, [], tail)
    for token in ids[: len(ids) // 2]:
        successor.push(token)
    assert run(successor, ids[len(ids) // 2 :]) == whole[len(ids) // 2 :]


def test_byte_fallback_spells_a_character_once_it_is_complete_and_keeps_blanks() -> None:
    tokenizer = TOKENIZERS["byte-fallback"]
    ids = [id_of(tokenizer, t) for t in ["\u2581a", "<0xE2>", "<0x82>", "<0xAC>", "\u2581", "b"]]
    deltas = run(Detokenizer(tokenizer, [], [id_of(tokenizer, "b")]), ids)
    assert deltas == [" a", "", "", "\u20ac", " ", "b", ""]


def test_special_tokens_add_no_text() -> None:
    end = id_of(BYTE_LEVEL, EOS)
    assert run(Detokenizer(BYTE_LEVEL, [], []), [end, *ids_of("he"), end, *ids_of("y"), end]) == [
        "",
        "he",
        "",
        "y",
        "",
        "",
    ]


def test_a_prompt_that_ends_within_a_character_does_not_garble_the_output() -> None:
    euro = ids_of("\u20ac")
    assert "".join(run(Detokenizer(BYTE_LEVEL, [], euro[:2]), ids_of("abc"))) == "abc"
