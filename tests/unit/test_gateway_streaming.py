"""From any log to events and whole answers: nothing lost, nothing twice, resumable at every event."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.errors import ApiError
from services.gateway.results import Transcript, completion_body, lookup_body
from services.gateway.streaming import DONE, EventStream, Position
from shared.bus import LogEntry
from shared.protocol.records import Accepted, Api, Claimed, Ended, ErrorInfo, Tokens, Usage

RID = "chatcmpl-0123456789abcdef01234567"
texts = st.text(st.characters(codec="utf-8"), max_size=12)


def accepted(api: Api) -> Accepted:
    return Accepted(RID, "t", "m", api, created_unix_s=5.7, deadline_unix_s=9, prompt_tokens=3, seed=11)


@st.composite
def logs(draw: st.DrawFn, fails: bool | None = None) -> list[LogEntry]:
    """A log as workers write it: claims anywhere, records of one or more tokens, gaps in the stream's sequence."""
    records: list[Any] = [accepted(draw(st.sampled_from(["chat", "completion"]))), Claimed(1, "prefill", "w", 0)]
    index = 0
    for text in draw(st.lists(texts, max_size=8)):
        count = draw(st.integers(1, 4))
        records.append(Tokens(1, index, list(range(count)), text))
        index += count
        if draw(st.booleans()):
            records.append(Claimed(2, "decode", "w2", 0))
    usage = Usage(3, index, 1, 4, 2)
    fails = draw(st.booleans()) if fails is None else fails
    if fails:
        error = draw(st.none() | st.just(ErrorInfo("broke", code="x")))
        records.append(Ended(2, draw(st.sampled_from(["error", "cancelled"])), usage, error))
    else:
        records.append(Ended(2, draw(st.sampled_from(["stop", "length"])), usage))
    seq = 0
    entries = []
    for record in records:
        seq += draw(st.integers(1, 5))
        entries.append(LogEntry(seq, record))
    return entries


def stream(log: list[LogEntry], usage: bool, after: Position | None = None) -> bytes:
    first = log[0].record
    assert isinstance(first, Accepted)
    events = EventStream(first, "fp_x", include_usage=usage, after=after or Position(0))
    start = after.seq - 1 if after else 0  # as the gateway follows: the named record is read again
    return b"".join(events.encode(entry) for entry in log if entry.seq > start)


def parse(body: bytes) -> list[tuple[str | None, Any]]:
    events: list[tuple[str | None, Any]] = []
    for block in body.decode().split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        events.append((fields.get("id"), fields["data"]))
    return events


def visible(log: list[LogEntry]) -> str:
    return "".join(entry.record.text for entry in log if isinstance(entry.record, Tokens))


@given(logs(fails=False), st.booleans())
def test_a_stream_carries_the_whole_text_once_and_ends_with_done(log: list[LogEntry], usage: bool) -> None:
    events = parse(stream(log, usage))
    assert events[-1] == (None, "[DONE]")
    bodies = [json.loads(data) for _, data in events[:-1]]
    choices = [body["choices"][0] for body in bodies if body["choices"]]
    assert "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices) == visible(log)
    assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] in ("stop", "length")
    assert [body["usage"] for body in bodies if body.get("usage")] == ([bodies[-1]["usage"]] if usage else [])
    assert {(body["id"], body["created"], body["model"]) for body in bodies} == {(RID, 5, "m")}


@given(logs(fails=True))
def test_a_failed_stream_ends_with_its_error_and_without_done(log: list[LogEntry]) -> None:
    body = stream(log, usage=True)
    assert not body.endswith(DONE)
    assert set(json.loads(parse(body)[-1][1])) == {"error"}


@given(logs(), st.booleans())
def test_resuming_behind_any_event_gives_exactly_the_events_after_it(log: list[LogEntry], usage: bool) -> None:
    events = parse(stream(log, usage))
    for n, (event_id, _) in enumerate(events, start=1):
        if event_id is not None:
            assert parse(stream(log, usage, Position.parse(event_id, RID, "p"))) == events[n:]


@given(logs())
def test_a_whole_answer_says_what_the_stream_says(log: list[LogEntry]) -> None:
    transcript = Transcript()
    for n, entry in enumerate(log):
        transcript.apply(entry)
        half = lookup_body(transcript, "fp_x")
        assert half["status"] in ("queued", "in_progress") or n == len(log) - 1
    body = completion_body(transcript, "fp_x")
    choice = body["choices"][0]
    assert (choice["message"]["content"] if transcript.accepted.api == "chat" else choice["text"]) == visible(log)
    assert body["usage"]["total_tokens"] == 3 + body["usage"]["completion_tokens"]
    assert (lookup_body(transcript, "fp_x")["error"] is None) == (transcript.status == "completed")


@given(st.integers(0, 10**17), st.integers(0, 9))
def test_event_ids_are_read_back(seq: int, part: int) -> None:
    position = Position(seq, part)
    assert Position.parse(position.event_id(RID), RID, "p") == position
    assert Position.parse(str(seq), RID, "p") == Position(seq)


@given(st.text(max_size=30).filter(lambda text: not text.strip()[:1].isdigit()))
def test_any_other_event_id_is_a_400_that_names_its_parameter(text: str) -> None:
    with pytest.raises(ApiError) as caught:
        Position.parse(text, RID, "starting_after")
    assert (caught.value.status, caught.value.param) == (400, "starting_after")


def test_another_requests_event_id_is_refused() -> None:
    with pytest.raises(ApiError):
        Position.parse("chatcmpl-other:5", RID, "p")
