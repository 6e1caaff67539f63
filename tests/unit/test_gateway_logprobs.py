"""Each token's own bytes, and log probabilities in OpenAI's forms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from services.gateway.logprobs import LogprobWriter, joined
from shared.models import TokenBytes
from shared.protocol.records import Accepted, Api, TokenLogprobs, Tokens
from tests.integration.gateway_harness import make_model


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level vocabulary of one token a byte; id 0 is special, id 257 was added."""
    raw = Tokenizer.from_file(str(make_model(tmp_path_factory.mktemp("m") / "tiny") / "tokenizer.json"))
    raw.add_special_tokens(["<|im_end|>"])
    raw.add_tokens([AddedToken("<tool é>", special=False)])
    return raw


def sentencepiece() -> Tokenizer:
    """Blanks as marks and lone bytes by name, as Llama 2 and Gemma have it."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581a", "b", "\u2581\u2581", "é"]
    raw = Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    raw.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return raw


@given(st.text(st.characters(codec="utf-8"), max_size=20))
def test_the_bytes_of_a_texts_tokens_are_the_text(bytewise: Tokenizer, text: str) -> None:
    for raw, encoded in ((bytewise, text), (sentencepiece(), text.replace(" ", "\u2581"))):
        tokens = TokenBytes(raw)
        found = [tokens.bytes_of(i) for i in ids_of(raw, encoded)]
        assert None not in found
        wanted = text if raw is bytewise else text.replace("\u2581", " ")
        assert b"".join(data or b"" for data in found) == wanted.encode()


def test_special_tokens_and_unknown_ids_have_a_name_and_no_bytes(bytewise: Tokenizer) -> None:
    tokens = TokenBytes(bytewise)
    assert (tokens.bytes_of(0), tokens.name_of(0)) == (None, "<|im_end|>")
    assert (tokens.bytes_of(99_999), tokens.name_of(99_999)) == (None, "token_id:99999")
    assert tokens.bytes_of(257) == "<tool é>".encode()


# One choice's records


def ids_of(raw: Tokenizer, text: str) -> list[int]:
    return list(raw.encode(text, add_special_tokens=False).ids)


def writer(raw: Tokenizer, api: Api, logprobs: int | None) -> LogprobWriter:
    return LogprobWriter(Accepted("r", "t", "m", api, 0, 0, 1, 1, logprobs=logprobs), TokenBytes(raw))


def test_a_chats_log_probabilities_show_the_bytes_of_half_a_character(bytewise: Tokenizer) -> None:
    ids = [*ids_of(bytewise, "a✔"), 0]
    told = [TokenLogprobs(-0.5, [(ids[0], -0.25), (ids[1], -0.5)]) for _ in ids]
    body = writer(bytewise, "chat", 2).body(Tokens(1, 0, ids, "a✔", told))
    assert body is not None
    content = body["content"]
    assert [entry["token"] for entry in content] == ["a", "\\xe2", "\\x9c", "\\x94", "<|im_end|>"]
    assert [entry["bytes"] for entry in content] == [[0x61], [0xE2], [0x9C], [0x94], None]
    assert {entry["logprob"] for entry in content} == {-0.5}
    assert content[3]["top_logprobs"] == [
        {"token": "a", "logprob": -0.25, "bytes": [0x61]},
        {"token": "\\xe2", "logprob": -0.5, "bytes": [0xE2]},
    ]


def test_a_completions_log_probabilities_tell_names_and_places(bytewise: Tokenizer) -> None:
    ids = [*ids_of(bytewise, "a✔b"), 0]
    made = writer(bytewise, "completion", 1)
    # In several records, and with a token that is none of the alternatives.
    halves = [
        made.body(Tokens(1, start, part, "", [TokenLogprobs(-2.0, [(ids[0], -0.5)]) for _ in part]))
        for start, part in ((0, ids[:2]), (2, ids[2:]))
    ]
    body = joined(halves)
    assert body == {
        "tokens": ["a", "bytes:\\xe2", "bytes:\\x9c", "bytes:\\x94", "b", "<|im_end|>"],
        "token_logprobs": [-2.0] * 6,
        "top_logprobs": [
            {"a": -0.5},
            {"a": -0.5, "bytes:\\xe2": -2.0},
            {"a": -0.5, "bytes:\\x9c": -2.0},
            {"a": -0.5, "bytes:\\x94": -2.0},
            {"a": -0.5, "b": -2.0},
            {"a": -0.5, "<|im_end|>": -2.0},
        ],
        "text_offset": [0, 1, 1, 1, 2, 3],
    }


@pytest.mark.parametrize("api", ["chat", "completion"])
def test_without_being_asked_for_there_are_none(bytewise: Tokenizer, api: Api) -> None:
    record = Tokens(1, 0, [5], "x", [TokenLogprobs(-1.0)])
    assert writer(bytewise, api, None).body(record) is None
    assert writer(bytewise, api, 0).body(record) is not None
    assert writer(bytewise, api, 0).body(Tokens(1, 0, [5], "x")) is None
    assert joined([None, None]) is None
