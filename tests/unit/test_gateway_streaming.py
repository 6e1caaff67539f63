"""From any logs to events and whole answers: nothing lost, nothing twice, resumable at every event."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.errors import ApiError
from services.gateway.positions import Position
from services.gateway.results import Transcript, completion_body, lookup_body
from services.gateway.streaming import DONE, EventStream
from shared.bus import LogEntry
from shared.models import ChatTokenizer, TokenBytes
from shared.protocol.records import (
    Accepted,
    Api,
    Claimed,
    Ended,
    ErrorInfo,
    TokenLogprobs,
    Tokens,
    Usage,
    choice_request_id,
)
from tests.integration.gateway_harness import make_model

RID = "chatcmpl-0123456789abcdef01234567"
texts = st.text(st.characters(codec="utf-8"), max_size=12)
Found = tuple[int, LogEntry]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenBytes:
    """A token for each byte; id 0 is special."""
    return TokenBytes(ChatTokenizer.load(make_model(tmp_path_factory.mktemp("tokens") / "tiny")).raw)


@st.composite
def logs(draw: st.DrawFn, fails: bool | None = None, most: int = 3) -> list[Found]:
    """All logs of a request as workers write them, in the order of the stream that holds them.

    Claims anywhere, records of one or more tokens, gaps in the sequence, any interleaving of the choices.
    """
    api: Api = draw(st.sampled_from(["chat", "completion"]))
    choices = draw(st.integers(1, most))
    logprobs = draw(st.none() | st.integers(0, 2))
    fails = draw(st.booleans()) if fails is None else fails
    failing = draw(st.integers(0, choices - 1)) if fails else None
    waiting = [
        _records(draw, _accepted(api, choices, choice, logprobs), fails=choice == failing) for choice in range(choices)
    ]
    seq, merged = 0, []
    while any(waiting):
        choice = draw(st.sampled_from([c for c, records in enumerate(waiting) if records]))
        seq += draw(st.integers(1, 5))
        merged.append((choice, LogEntry(seq, waiting[choice].pop(0))))
    return merged


def _accepted(api: Api, choices: int, choice: int, logprobs: int | None) -> Accepted:
    return Accepted(
        choice_request_id(RID, choice), "t", "m", api, created_unix_s=5.7, deadline_unix_s=9,
        prompt_tokens=3, seed=11 + choice, choices=choices, choice=choice, logprobs=logprobs,
    )  # fmt: skip


def _records(draw: st.DrawFn, accepted: Accepted, *, fails: bool) -> list[Any]:
    records: list[Any] = [accepted, Claimed(1, "prefill", "w", 0)]
    index = 0
    for text in draw(st.lists(texts, max_size=5)):
        ids = draw(st.lists(st.integers(0, 256), min_size=1, max_size=3))
        told = [] if accepted.logprobs is None else [TokenLogprobs(-0.5, [(i, -0.5)][: accepted.logprobs]) for i in ids]
        records.append(Tokens(1, index, ids, text, told))
        index += len(ids)
        if draw(st.booleans()):
            records.append(Claimed(2, "decode", "w2", 0))
    usage = Usage(3, index, 1, 4, 2)
    if fails:
        error = draw(st.none() | st.just(ErrorInfo("broke", code="x")))
        records.append(Ended(2, draw(st.sampled_from(["error", "cancelled"])), usage, error))
    else:
        records.append(Ended(2, draw(st.sampled_from(["stop", "length"])), usage))
    return records


def first_of(log: list[Found]) -> Accepted:
    return next(e.record for c, e in log if c == 0 and isinstance(e.record, Accepted))


def stream(log: list[Found], tokens: TokenBytes, usage: bool, after: Position | None = None) -> bytes:
    events = EventStream(first_of(log), "fp_x", tokens, include_usage=usage, after=after)
    return b"".join(events.encode(*found) for found in log)


def parse(body: bytes) -> list[tuple[str | None, Any]]:
    events: list[tuple[str | None, Any]] = []
    for block in body.decode().split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        events.append((fields.get("id"), fields["data"]))
    return events


def visible(log: list[Found], choice: int) -> str:
    return "".join(e.record.text for c, e in log if c == choice and isinstance(e.record, Tokens))


def sampled(log: list[Found], choice: int) -> int:
    return sum(len(e.record.ids) for c, e in log if c == choice and isinstance(e.record, Tokens))


def by_choice(bodies: list[Any]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = defaultdict(list)
    for body in bodies:
        for choice in body.get("choices", []):
            found[choice["index"]].append(choice)
    return found


@given(logs(fails=False), st.booleans())
def test_a_stream_carries_every_choices_text_once_and_ends_with_done(
    tokens: TokenBytes, log: list[Found], usage: bool
) -> None:
    first = first_of(log)
    events = parse(stream(log, tokens, usage))
    assert events[-1] == (None, "[DONE]")
    bodies = [json.loads(data) for _, data in events[:-1]]
    found = by_choice(bodies)
    assert sorted(found) == list(range(first.choices))
    for n, choices in found.items():
        assert "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices) == visible(log, n)
        assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] in ("stop", "length")
        assert choices[-1]["seed"] == 11 + n
        shown = sum(len(c["logprobs"].get("content") or c["logprobs"]["tokens"]) for c in choices if c["logprobs"])
        assert shown == (0 if first.logprobs is None else sampled(log, n))
    if usage:
        total = bodies[-1]["usage"]
        assert bodies[-1]["choices"] == []
        assert total["prompt_tokens"] == 3
        assert total["prompt_tokens_details"]["cached_tokens"] == 1
        assert total["completion_tokens"] == sum(sampled(log, n) for n in found)
    assert [body["usage"] for body in bodies if body.get("usage")] == ([bodies[-1]["usage"]] if usage else [])
    assert {(body["id"], body["created"], body["model"]) for body in bodies} == {(RID, 5, "m")}


@given(logs(fails=True))
def test_a_stream_with_a_failed_choice_ends_with_its_error_and_without_done(
    tokens: TokenBytes, log: list[Found]
) -> None:
    body = stream(log, tokens, usage=True)
    assert DONE not in body
    events = [json.loads(data) for _, data in parse(body)]
    assert [n for n, event in enumerate(events) if set(event) == {"error"}] == [len(events) - 1]


@given(logs(), st.booleans())
def test_resuming_behind_any_event_gives_exactly_the_events_after_it(
    tokens: TokenBytes, log: list[Found], usage: bool
) -> None:
    events = parse(stream(log, tokens, usage))
    for n, (event_id, _) in enumerate(events, start=1):
        if event_id is not None:
            after = Position.parse(event_id, RID, first_of(log).choices, "p")
            assert parse(stream(log, tokens, usage, after)) == events[n:]


@given(logs(fails=False), st.randoms(use_true_random=False), st.data())
def test_a_stream_seen_in_another_order_is_continued_without_loss_or_repeats(
    tokens: TokenBytes, log: list[Found], random: Any, data: st.DataObject
) -> None:
    """The first gateway met the logs in any order that keeps each log's own; the second one reads them sorted."""
    heads = {choice: [found for found in log if found[0] == choice] for choice, _ in log}
    met: list[Found] = []
    while heads:
        choice = random.choice(sorted(heads))
        met.append(heads[choice].pop(0))
        if not heads[choice]:
            del heads[choice]
    events = parse(stream(met, tokens, usage=True))
    n = data.draw(st.integers(0, len(events) - 2))
    event_id = events[n][0]
    assert event_id is not None
    after = Position.parse(event_id, RID, first_of(log).choices, "p")
    rest = parse(stream(log, tokens, usage=True, after=after))
    whole = [json.loads(body) for _, body in events[:-1]]
    again = [json.loads(body) for _, body in [*events[: n + 1], *rest[:-1]]]
    assert by_choice(again) == by_choice(whole)
    assert rest[-1] == (None, "[DONE]")
    assert len(again) == len(whole)


@given(logs())
def test_a_whole_answer_says_what_the_stream_says(tokens: TokenBytes, log: list[Found]) -> None:
    first = first_of(log)
    transcript = Transcript(first.choices)
    for n, found in enumerate(log):
        transcript.apply(*found)
        if transcript.choices[0].state.accepted is None:
            continue
        half = lookup_body(transcript, "fp_x", tokens)
        failed = transcript.failure is not None
        assert half["status"] in ("queued", "in_progress") or failed or n == len(log) - 1
        assert (half["usage"] is None) == (n < len(log) - 1)
    body = completion_body(transcript, "fp_x", tokens)
    assert [choice["index"] for choice in body["choices"]] == list(range(first.choices))
    streamed = by_choice([json.loads(data) for _, data in parse(stream(log, tokens, usage=False)) if data != "[DONE]"])
    for n, choice in enumerate(body["choices"]):
        text = choice["message"]["content"] if first.api == "chat" else choice["text"]
        assert text == visible(log, n)
        assert choice["seed"] == 11 + n
        if transcript.failure is None:
            assert choice["finish_reason"] == streamed[n][-1]["finish_reason"]
            assert flat(choice["logprobs"]) == flat(*(part["logprobs"] for part in streamed[n]))
    assert body["usage"]["total_tokens"] == 3 + body["usage"]["completion_tokens"]
    assert (lookup_body(transcript, "fp_x", tokens)["error"] is None) == (transcript.status == "completed")


def flat(*bodies: dict[str, Any] | None) -> dict[str, list[Any]]:
    lists: dict[str, list[Any]] = defaultdict(list)
    for body in bodies:
        for name, part in (body or {}).items():
            lists[name] += part or []
    return lists


@given(st.lists(st.integers(0, 10**17), min_size=1, max_size=9), st.integers(0, 9))
def test_event_ids_are_read_back(seqs: list[int], part: int) -> None:
    position = Position(tuple(seqs), part)
    assert Position.parse(position.event_id(RID), RID, len(seqs), "p") == position
    assert Position.parse(str(seqs[0]), RID, 1, "p") == Position((seqs[0],))


@given(st.text(max_size=30).filter(lambda text: not text.strip()[:1].isdigit()), st.integers(1, 4))
def test_any_other_event_id_is_a_400_that_names_its_parameter(text: str, choices: int) -> None:
    with pytest.raises(ApiError) as caught:
        Position.parse(text, RID, choices, "starting_after")
    assert (caught.value.status, caught.value.param) == (400, "starting_after")


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("chatcmpl-other:5", 1),
        ("5-0", 1),
        ("5", 2),
        ("5-0", 2),
        ("5-0-0-0", 2),
        ("5-0-6", 2),
        ("5-0--1", 2),
        ("5-" * 5000 + "0", 5000),
    ],
)
def test_an_event_id_of_another_request_or_of_another_number_of_choices_is_refused(text: str, choices: int) -> None:
    with pytest.raises(ApiError) as caught:
        Position.parse(text, RID, choices, "p")
    assert caught.value.param == "p"


def test_a_choice_whose_log_is_not_begun_counts_as_queued(tokens: TokenBytes) -> None:
    transcript = Transcript(2)
    transcript.apply(0, LogEntry(1, _accepted("chat", 2, 0, None)))
    assert transcript.status == "queued"
    assert [accepted.request_id for accepted in transcript.openings] == [RID, f"{RID}-c1"]
    transcript.apply(0, LogEntry(2, Ended(0, "stop", Usage(3, 0))))
    body = lookup_body(transcript, "fp_x", tokens)
    assert (body["usage"], body["choices"][1]["seed"], body["error"]) == (None, None, None)
    assert body["status"] == "in_progress"
