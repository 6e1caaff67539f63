"""The OpenAI request bodies: strict, total, and precise about what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.call import GenerationCall, Messages, TokenIds
from services.gateway.errors import ApiError
from services.gateway.openai_schema import parse_call, parse_json
from shared.protocol.records import Api

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
known = sorted(
    {"model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p"}
    | {"seed", "stop", "stop_token_ids", "ignore_eos", "stream", "stream_options", "user", "speculation", "priority"}
    | {"n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens"}
    | {"logprobs", "top_logprobs", "tools", "response_format", "metadata", "echo", "suffix"}
)


T = TypeVar("T")


def attempt(work: Callable[[], T]) -> T | ApiError:
    """What a call returns or refuses with; anything else it raises is a failure of the test."""
    try:
        return work()
    except ApiError as error:
        return error


def refusal(fields: dict[str, Any], api: Api = "chat") -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_call(fields, api)
    return caught.value


@given(st.binary(max_size=200))
def test_any_bytes_are_a_json_object_or_a_400(body: bytes) -> None:
    result = attempt(lambda: parse_json(body))
    if isinstance(result, ApiError):
        assert (result.status, result.code) == (400, "invalid_json")
    else:
        assert isinstance(result, dict)


@given(st.dictionaries(st.text(max_size=10), json_values, max_size=5))
def test_what_json_writes_is_read_back_unless_it_holds_what_json_does_not_know(fields: dict[str, Any]) -> None:
    try:
        text = json.dumps(fields, allow_nan=False).encode("utf-8")
    except ValueError:
        return
    result = attempt(lambda: parse_json(text))
    if isinstance(result, ApiError):
        assert result.code == "invalid_json"  # numbers beyond the range of floats, lone surrogates
    else:
        assert json.loads(json.dumps(result)) == json.loads(text)


@given(
    st.sampled_from(["chat", "completion"]),
    st.dictionaries(st.sampled_from(known) | st.text(max_size=6), json_values, max_size=6),
)
def test_any_json_object_is_a_call_or_a_400_that_names_a_field_of_it(api: Api, fields: dict[str, Any]) -> None:
    body = {**(CHAT if api == "chat" else TEXT), **fields}
    call = attempt(lambda: parse_call(body, api))
    if isinstance(call, ApiError):
        assert call.status == 400
        root = (call.param or "").replace("[", ".").split(".")[0]
        assert root in {*(key.replace("[", ".").split(".")[0] for key in body), "messages", "prompt", "model"}
    else:
        assert isinstance(call, GenerationCall)
        assert call.max_tokens is None or call.max_tokens >= 1
        assert 0 <= call.temperature <= 2
        assert 0 < call.top_p <= 1
        assert call.seed is None or 0 <= call.seed < 2**63
        assert 1 <= call.n <= 128
        assert call.choices == call.n * len(call.prompts)
        assert -2 <= call.presence_penalty <= 2
        assert -2 <= call.frequency_penalty <= 2
        assert 0 < call.repetition_penalty <= 2
        assert call.min_tokens >= 0
        assert call.logprobs is None or 0 <= call.logprobs <= (20 if api == "chat" else 5)
        assert all(type(token_id) is int and -100 <= bias <= 100 for token_id, bias in call.logit_bias.items())


NEUTRAL = {
    "n": 1,
    "best_of": 1,
    "min_tokens": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "logprobs": False,
    "top_logprobs": 0,
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "metadata": {},
    "store": False,
    "service_tier": "auto",
    "repetition_penalty": 1.0,
}


@given(st.sets(st.sampled_from(sorted(NEUTRAL))), st.booleans())
def test_neutral_values_change_nothing_and_not_even_the_digest(names: set[str], null: bool) -> None:
    fields = {name: None if null else NEUTRAL[name] for name in names}
    assert parse_call({**CHAT, **fields}, "chat") == parse_call(CHAT, "chat")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 2),
        ("tools", [{}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("store", True),
        ("metadata", {"a": "b"}),
    ],
)
def test_an_unsupported_parameter_that_asks_for_something_is_refused_by_name(name: str, value: object) -> None:
    error = refusal({**CHAT, name: value})
    assert (error.status, error.param, error.code) == (400, name, "unsupported_parameter")


def test_a_prediction_is_one_text_or_several_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for content, text in (("x", "x"), (parts, "a\nb"), ("", "")):
        assert parse_call({**CHAT, "prediction": {"type": "content", "content": content}}, "chat").prediction == text
    assert parse_call({**CHAT, "prediction": None}, "chat").prediction == ""


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("x", "prediction"),
        ({"content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "text", "content": "x"}, "prediction.type"),
        ({"type": "content", "content": []}, "prediction.content"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0].type"),
        ({"type": "content", "content": "x", "more": 1}, "prediction.more"),
    ],
)
def test_a_bad_prediction_is_refused_by_name(prediction: object, param: str) -> None:
    assert refusal({**CHAT, "prediction": prediction}).param == param


def test_completions_have_no_prediction() -> None:
    error = refusal({**TEXT, "prediction": {"type": "content", "content": "x"}}, "completion")
    assert (error.param, error.code) == ("prediction", "unknown_parameter")


@pytest.mark.parametrize("name", ["tool_calls", "name", "function_call", "tool_call_id", "audio"])
def test_unsupported_message_fields_are_refused_with_their_place(name: str) -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": "x", name: [{"id": "1"}]}]
    assert refusal({**CHAT, "messages": messages}).param == f"messages[1].{name}"


def test_an_answer_sent_back_as_it_came_is_accepted() -> None:
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "tool_calls": None,
        "audio": None,
    }
    call = parse_call({**CHAT, "messages": [*CHAT["messages"], answer]}, "chat")
    assert call.prompts == (Messages([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x"}]),)


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("x", ("x",)),
        (["x"], ("x",)),
        (["a", "b", "a"], ("a", "b", "a")),
        ([5, 6], (TokenIds([5, 6]),)),
        ([[5, 6]], (TokenIds([5, 6]),)),
        ([[5], [6, 7]], (TokenIds([5]), TokenIds([6, 7]))),
    ],
)
def test_a_prompt_is_one_or_several_texts_or_lists_of_ids(prompt: object, wanted: object) -> None:
    assert parse_call({**TEXT, "prompt": prompt}, "completion").prompts == wanted
    assert parse_call({**TEXT, "prompt": prompt, "n": 2}, "completion").choices == 2 * len(prompt_list(wanted))


def prompt_list(wanted: object) -> tuple[object, ...]:
    assert isinstance(wanted, tuple)
    return wanted


@pytest.mark.parametrize(
    "prompt", [[1, "a"], ["a", [1]], [[1], "a"], ["a", 1], [True], [[True]], [[]], ["a", ""], [[1], []], [], "", 5, {}]
)
def test_any_other_prompt_is_refused(prompt: object) -> None:
    assert refusal({**TEXT, "prompt": prompt}, "completion").param == "prompt"


@pytest.mark.parametrize(
    ("api", "fields", "param"),
    [
        ("chat", {"n": 0}, "n"),
        ("chat", {"n": 129}, "n"),
        ("chat", {"n": True}, "n"),
        ("chat", {"n": 1.0}, "n"),
        ("chat", {"n": 2, "best_of": 3}, "best_of"),
        ("chat", {"best_of": 0}, "best_of"),
        ("chat", {"presence_penalty": 2.1}, "presence_penalty"),
        ("chat", {"presence_penalty": "1"}, "presence_penalty"),
        ("chat", {"frequency_penalty": -2.1}, "frequency_penalty"),
        ("chat", {"frequency_penalty": True}, "frequency_penalty"),
        ("chat", {"repetition_penalty": 0}, "repetition_penalty"),
        ("chat", {"repetition_penalty": -1}, "repetition_penalty"),
        ("chat", {"repetition_penalty": 2.5}, "repetition_penalty"),
        ("chat", {"min_tokens": -1}, "min_tokens"),
        ("chat", {"min_tokens": 1.5}, "min_tokens"),
        ("chat", {"logit_bias": [5]}, "logit_bias"),
        ("chat", {"logit_bias": {"5": 101}}, "logit_bias"),
        ("chat", {"logit_bias": {"5": -100.5}}, "logit_bias"),
        ("chat", {"logit_bias": {"5": None}}, "logit_bias"),
        ("chat", {"logit_bias": {"5": True}}, "logit_bias"),
        ("chat", {"logit_bias": {"5": "1"}}, "logit_bias"),
        ("chat", {"logit_bias": {"-5": 1}}, "logit_bias"),
        ("chat", {"logit_bias": {"05": 1}}, "logit_bias"),
        ("chat", {"logit_bias": {" 5": 1}}, "logit_bias"),
        ("chat", {"logit_bias": {"five": 1}}, "logit_bias"),
        ("chat", {"logit_bias": {"": 1}}, "logit_bias"),
        ("chat", {"logit_bias": {"\u0665": 1}}, "logit_bias"),
        ("chat", {"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        ("chat", {"logprobs": 1}, "logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ("chat", {"top_logprobs": 2}, "top_logprobs"),
        ("chat", {"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ("completion", {"logprobs": 6}, "logprobs"),
        ("completion", {"logprobs": True}, "logprobs"),
        ("completion", {"top_logprobs": 1}, "top_logprobs"),
        ("completion", {"n": 2, "best_of": 1}, "best_of"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(api: Api, fields: dict[str, Any], param: str) -> None:
    error = refusal({**(CHAT if api == "chat" else TEXT), **fields}, api)
    assert (error.status, error.param) == (400, param)


def test_the_values_at_the_bounds_are_taken() -> None:
    bias = {str(i): (-100, 100.0)[i % 2] for i in range(300)}
    fields = {"n": 3, "best_of": 3, "presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 2}
    call = parse_call({**CHAT, **fields, "logit_bias": bias, "min_tokens": 7, "logprobs": True}, "chat")
    assert (call.n, call.choices, call.presence_penalty, call.frequency_penalty) == (3, 3, -2.0, 2.0)
    assert (call.repetition_penalty, call.min_tokens, call.logprobs) == (2.0, 7, 0)
    assert call.logit_bias == {i: (-100.0, 100.0)[i % 2] for i in range(300)}
    assert parse_call({**CHAT, "logprobs": True, "top_logprobs": 20}, "chat").logprobs == 20
    assert parse_call({**TEXT, "logprobs": 5}, "completion").logprobs == 5
    assert parse_call({**TEXT, "logprobs": 0}, "completion").logprobs == 0
    assert parse_call(TEXT, "completion").logprobs is None


def test_both_names_of_the_output_limit_work_and_may_not_differ() -> None:
    assert parse_call({**CHAT, "max_tokens": 3}, "chat").max_tokens == 3
    assert parse_call({**CHAT, "max_completion_tokens": 4}, "chat").max_tokens == 4
    assert parse_call({**CHAT, "max_tokens": 5, "max_completion_tokens": 5}, "chat").max_tokens == 5
    assert refusal({**CHAT, "max_tokens": 5, "max_completion_tokens": 6}).param == "max_completion_tokens"
    assert refusal({**TEXT, "max_completion_tokens": 6}, "completion").param == "max_completion_tokens"


def test_the_digest_tells_what_decides_the_output_from_what_does_not() -> None:
    digest = parse_call(CHAT, "chat").digest
    same: list[dict[str, Any]] = [
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"user": "u"},
        {"priority": "low"},
        {"n": 1},
        {"best_of": 1},
        {"logit_bias": {}},
        {"temperature": None},
        {"prediction": {"type": "content", "content": "x"}},
    ]
    for fields in same:
        assert parse_call({**CHAT, **fields}, "chat").digest == digest
    other: list[dict[str, Any]] = [
        {"seed": 1},
        {"temperature": 0},
        {"max_tokens": 5},
        {"stop": "x"},
        {"n": 2},
        {"presence_penalty": 1},
        {"frequency_penalty": 1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {"5": 1}},
        {"logit_bias": {"5": 0}},
        {"min_tokens": 1},
        {"logprobs": True},
        {"logprobs": True, "top_logprobs": 1},
    ]
    digests = {parse_call({**CHAT, **fields}, "chat").digest for fields in other}
    assert len(digests | {digest}) == len(other) + 1
    texts: list[dict[str, Any]] = [
        {},
        {"logprobs": 0},
        {"logprobs": 1},
        {"prompt": ["hi", "hi"]},
        {"prompt": ["hi", "x"]},
    ]
    assert len({parse_call({**TEXT, **fields}, "completion").digest for fields in texts}) == len(texts)


def test_a_refusal_never_quotes_the_prompt() -> None:
    secret = "zebra" * 20
    for fields in ({"temperature": secret}, {"stop": [1, secret]}, {"messages": [{"role": secret, "content": secret}]}):
        assert "zebra" not in refusal({**CHAT, **fields}).message
