"""A verifier that cannot fail proves nothing: each way to break an answer is made here, and must be found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from loadgen.chaos.observer import Entry
from loadgen.chaos.reading import Reading, Shown
from loadgen.chaos.verify import Answer, Verdict, answer_of, check_log, check_reader
from loadgen.chaos.workload import Request
from shared.protocol.records import Accepted, Claimed, Ended, HandedBack, Record, TokenLogprobs, Tokens, Usage

IDS = [5, 6, 7, 8, 9, 10]
TEXT = "five six seven eight nine ten "
WORDS = dict(zip(IDS, TEXT.split(), strict=True))
CLEAN = Verdict(problems=[])


def text_of(ids: Sequence[int]) -> str:
    return "".join(f"{WORDS[token]} " for token in ids)


def tokens(index: int, ids: list[int], epoch: int = 2) -> Tokens:
    return Tokens(epoch=epoch, index=index, ids=ids, text=text_of(ids))


def ended(epoch: int = 3, **changes: Any) -> Ended:
    usage = {"prompt_tokens": 20, "completion_tokens": len(IDS), "cached_tokens": 8, **changes.pop("usage", {})}
    return Ended(**{"epoch": epoch, "reason": "length", "usage": Usage(**usage), **changes})


def good_log() -> list[Record]:
    """Prefill, a decode worker that dies, its successor."""
    return [
        Accepted("r", "t", "m", "chat", 1.0, 9.0, 20, 3),
        Claimed(1, "prefill", "prefill-0.a", 1.1),
        tokens(0, [5], epoch=1),
        Claimed(2, "decode", "decode-0.a", 1.2),
        tokens(1, [6, 7]),
        Claimed(3, "decode", "decode-1.a", 1.3),
        tokens(3, [8, 9, 10], epoch=3),
        ended(),
    ]


def stored(records: list[Record]) -> list[Entry]:
    return [Entry(10 + 2 * n, record) for n, record in enumerate(records)]


EXPECTED = Answer(IDS, TEXT, "length", 20)


def verdict_of(records: list[Record], **options: Any) -> Verdict:
    return check_log(stored(records), EXPECTED, **{"speculates": False, **options})


def changed(place: int, record: Record) -> Callable[[list[Record]], list[Record]]:
    return lambda log: [*log[:place], record, *log[place + 1 :]]


def inserted(place: int, record: Record) -> Callable[[list[Record]], list[Record]]:
    return lambda log: [*log[:place], record, *log[place:]]


def without(place: int) -> Callable[[list[Record]], list[Record]]:
    return lambda log: [*log[:place], *log[place + 1 :]]


def test_a_log_with_takeovers_and_the_undisturbed_tokens_is_clean() -> None:
    assert verdict_of(good_log()) == CLEAN
    assert answer_of(stored(good_log())) == EXPECTED


@pytest.mark.parametrize(
    ("breaks", "lost", "repeated", "differ"),
    [
        pytest.param(without(4), 2, 0, 0, id="a record with two tokens is missing in the middle"),
        pytest.param(without(6), 3, 0, 0, id="the last tokens are missing"),
        pytest.param(inserted(5, tokens(1, [6, 7])), 0, 2, 0, id="a record came twice"),
        pytest.param(changed(6, tokens(2, [7, 8, 9, 10], epoch=3)), 0, 1, 0, id="a successor repeats a token"),
        pytest.param(changed(4, tokens(1, [6, 8])), 0, 0, 1, id="one token is another"),
        pytest.param(changed(6, tokens(3, [8, 9, 10, 5], epoch=3)), 0, 0, 1, id="a token too many"),
        pytest.param(changed(6, tokens(4, [9, 10], epoch=3)), 1, 0, 0, id="an index is skipped"),
    ],
)
def test_lost_repeated_and_changed_tokens_are_counted(
    breaks: Callable[[list[Record]], list[Record]], lost: int, repeated: int, differ: int
) -> None:
    verdict = verdict_of(breaks(good_log()))
    assert (verdict.lost, verdict.repeated, verdict.changed) == (lost, repeated, differ)
    assert verdict.problems


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        pytest.param(inserted(8, ended()), "2 terminal records", id="two ends"),
        pytest.param(without(7), "0 terminal records", id="no end"),
        pytest.param(inserted(8, tokens(6, [], epoch=3)), "after the terminal", id="a record behind the end"),
        pytest.param(without(0), "accepted", id="no beginning"),
        pytest.param(inserted(1, good_log()[0]), "accepted", id="two beginnings"),
        pytest.param(changed(6, tokens(3, [8, 9, 10], epoch=2)), "epoch 2 in epoch 3", id="a zombie writes"),
        pytest.param(changed(5, Claimed(4, "decode", "w", 1.3)), "claim of epoch 4", id="an epoch is skipped"),
        pytest.param(changed(5, Claimed(2, "decode", "w", 1.3)), "claim of epoch 2", id="an epoch comes twice"),
        pytest.param(inserted(5, HandedBack(1, "decode", "w")), "epoch 1 in epoch 2", id="hand-back of another epoch"),
        pytest.param(changed(7, ended(usage={"completion_tokens": 5})), "usage says 20 + 5", id="wrong completion"),
        pytest.param(changed(7, ended(usage={"prompt_tokens": 21})), "usage says 21 + 6", id="wrong prompt"),
        pytest.param(changed(7, ended(usage={"cached_tokens": 21})), "21 of 20", id="more cached than there was"),
        pytest.param(changed(7, ended(usage={"drafted_tokens": 2})), "drafted", id="drafts that nobody asked for"),
        pytest.param(changed(7, ended(reason="stop")), "ended with stop", id="another finish reason"),
        pytest.param(changed(7, ended(reason="error")), "ended with error", id="an error"),
        pytest.param(changed(7, ended(reason="cancelled")), "ended with cancelled", id="cancelled"),
        pytest.param(
            changed(6, Tokens(3, 3, [8, 9, 10], "eight nine elf ")), "the text is", id="right tokens, another text"
        ),
        pytest.param(
            changed(6, Tokens(3, 3, [8, 9, 10], text_of([8, 9, 10]), [TokenLogprobs(-1.0)])),
            "log probabilities differ",
            id="log probabilities nobody had",
        ),
    ],
)
def test_a_log_that_breaks_a_rule_is_found(breaks: Callable[[list[Record]], list[Record]], says: str) -> None:
    problems = verdict_of(breaks(good_log())).problems
    assert any(says in problem for problem in problems), problems


def test_more_accepted_than_drafted_tokens_are_found() -> None:
    log = changed(7, ended(usage={"drafted_tokens": 2, "accepted_tokens": 3}))(good_log())
    assert verdict_of(log, speculates=True).problems
    assert not verdict_of(changed(7, ended(usage={"drafted_tokens": 3}))(good_log()), speculates=True).problems


@pytest.mark.parametrize("cut", [without(0), without(7), without(4), changed(7, ended(reason="error"))])
def test_a_broken_log_is_no_reference(cut: Callable[[list[Record]], list[Record]]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - which one says the message
        answer_of(stored(cut(good_log())))


# Readers

USAGE = {"prompt_tokens": 20, "completion_tokens": 6, "total_tokens": 26}


def request(**changes: Any) -> Request:
    fields: dict[str, Any] = {"number": 0, "api": "chat", "body": {"seed": 3}, "client": "stream", "gateway": 0}
    return Request(**{**fields, "prompt": "short", "include_usage": True, **changes})


def http_reading() -> Reading:
    shown = [Shown(1.0, 0, 10)]
    for entry in stored(good_log()):
        if isinstance(entry.record, Tokens):
            shown.append(Shown(2.0, 0, entry.seq, entry.record.text))
    shown.append(Shown(3.0, 0, 24, finish="length"))
    return Reading("client", "stream", "r", shown=shown, usage=dict(USAGE), usage_events=1, ended_s=4.0)


def nats_reading() -> Reading:
    shown = []
    for entry in stored(good_log()):
        match entry.record:
            case Tokens() as record:
                shown.append(Shown(2.0, 0, entry.seq, record.text, len(record.ids)))
            case Ended() as record:
                shown.append(Shown(3.0, 0, entry.seq, finish=record.reason, tokens=0))
            case _:
                shown.append(Shown(1.0, 0, entry.seq, tokens=0))
    return Reading("reader 1", "nats", "r", shown=shown, ended_s=4.0)


def whole_reading(text: str = TEXT, finish: str = "length", index: int = 0) -> Reading:
    choice = {"index": index, "message": {"content": text}, "finish_reason": finish}
    return Reading("client", "whole", "r", whole={"choices": [choice]}, usage=dict(USAGE), ended_s=4.0)


def judge(reading: Reading, of: Request | None = None) -> Verdict:
    return check_reader(reading, of or request(), [stored(good_log())], [EXPECTED])


@pytest.mark.parametrize("reading", [http_reading(), nats_reading(), whole_reading()])
def test_a_reader_that_saw_everything_once_is_clean(reading: Reading) -> None:
    assert judge(reading) == CLEAN


@pytest.mark.parametrize("make", [http_reading, nats_reading])
def test_what_a_reader_lost_got_twice_or_got_changed_is_counted(make: Callable[[], Reading]) -> None:
    at = next(n for n, event in enumerate(make().shown) if event.seq == 18)
    lost, repeated, other = make(), make(), make()
    del lost.shown[at]
    repeated.shown.insert(at, repeated.shown[at])
    other.shown[at] = msgspec.structs.replace(other.shown[at], text="six nine ")
    assert (judge(lost).lost, judge(lost).repeated, judge(lost).changed) == (2, 0, 0)
    assert (judge(repeated).lost, judge(repeated).repeated) == (0, 2)
    assert judge(other).changed == 2
    assert all(judge(reading).problems for reading in (lost, repeated, other))


def test_an_event_that_tells_of_another_number_of_tokens_is_found() -> None:
    reading = nats_reading()
    reading.shown[4] = msgspec.structs.replace(reading.shown[4], tokens=1)
    assert judge(reading).changed == 2


def swap(shown: list[Shown]) -> None:
    shown[1], shown[2] = shown[2], shown[1]


def relabel(shown: list[Shown]) -> None:
    shown[1] = msgspec.structs.replace(shown[1], seq=999)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (swap, "out of order"),
        (relabel, "unknown events"),
        (lambda shown: shown.pop(), "finish reasons []"),
        (lambda shown: shown.append(msgspec.structs.replace(shown[-1], seq=26)), "finish reasons"),
        (lambda shown: shown.pop(0), "lost events"),
    ],
)
def test_events_that_are_not_the_logs_are_found(spoil: Callable[[list[Shown]], object], says: str) -> None:
    reading = http_reading()
    spoil(reading.shown)
    assert any(says in problem for problem in judge(reading).problems), judge(reading).problems


def test_a_reader_that_failed_or_never_ended_is_found() -> None:
    failed, hanging = http_reading(), http_reading()
    failed.error, hanging.ended_s = "503 deadline_exceeded", 0.0
    assert judge(failed).problems == ["client: 503 deadline_exceeded"]
    assert judge(hanging).problems == ["client: the reader never came to the end"]


@pytest.mark.parametrize("events", [0, 2])
def test_the_usage_comes_once(events: int) -> None:
    reading = http_reading()
    reading.usage_events = events
    assert judge(reading).problems
    assert judge(http_reading(), request(include_usage=False)).problems


@pytest.mark.parametrize("field", list(USAGE))
def test_a_wrong_usage_is_found(field: str) -> None:
    for make in (http_reading, whole_reading):
        reading = make()
        assert reading.usage is not None
        reading.usage[field] += 1
        assert any("usage says" in problem for problem in judge(reading).problems)


def test_log_probabilities_must_cover_every_token() -> None:
    logprobs = request(body={"seed": 3, "logprobs": True})
    reading = http_reading()
    reading.shown = [
        msgspec.structs.replace(event, tokens=len(event.text.split())) if event.text else event
        for event in reading.shown
    ]
    assert judge(reading, logprobs) == CLEAN
    reading.shown[1] = msgspec.structs.replace(reading.shown[1], tokens=2)
    assert judge(reading, logprobs).problems


@pytest.mark.parametrize(
    "reading", [whole_reading(text="five six "), whole_reading(finish="stop"), whole_reading(index=1)]
)
def test_a_whole_answer_that_differs_is_found(reading: Reading) -> None:
    assert judge(reading).problems


def test_a_choice_that_one_reader_never_saw_is_found() -> None:
    two = request(body={"seed": 3, "n": 2}, include_usage=False)
    reading = http_reading()
    reading.usage, reading.usage_events = None, 0
    verdict = check_reader(reading, two, [stored(good_log())] * 2, [EXPECTED] * 2)
    assert verdict.lost == len(IDS)
    assert any("choice 1" in problem for problem in verdict.problems)


def test_a_gap_is_the_longest_silence_that_ended_after_the_fault() -> None:
    reading = Reading("client", "stream", sent_s=0.0)
    reading.shown = [Shown(at, 0, n, text="x") for n, at in enumerate((3.0, 3.1, 5.1, 5.2))]
    assert reading.gap(since_s=3.5) == (pytest.approx(2.0), 5.1)
    assert reading.gap(since_s=1.0) == (pytest.approx(3.0), 3.0)
    assert reading.gap(since_s=6.0) is None
