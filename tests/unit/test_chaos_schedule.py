"""The same seed gives the same requests and the same schedule, and a whole pass leaves no fault out."""

from __future__ import annotations

from collections import Counter

import pytest

from loadgen.chaos.aiming import LONG_PROMPT_TOKENS
from loadgen.chaos.errors import NoSuchFault
from loadgen.chaos.report import Gap, Report, Struck, encode, quantiles, rows
from loadgen.chaos.schedule import FAULTS, PAIRS, schedule, whole_pass
from loadgen.chaos.sse_events import SseReader
from loadgen.chaos.workload import LONG_WORDS, OUTPUT_TOKENS, WAVE, wave_of_requests

EVERYTHING = frozenset(("nothing", "proxies"))
TARGETS = {"gateway", "prefill", "decode", "draft", "kvstore", "nats", "valkey", "client", "kv"}


def test_a_seed_repeats_requests_and_schedule_and_another_changes_them() -> None:
    assert wave_of_requests(7, 3) == wave_of_requests(7, 3)
    assert wave_of_requests(7, 3) != wave_of_requests(8, 3)
    assert schedule(7, 0, 40, EVERYTHING) == schedule(7, 0, 40, EVERYTHING)
    assert schedule(7, 0, 40, EVERYTHING) != schedule(8, 0, 40, EVERYTHING)


def test_one_pass_makes_every_fault_and_hits_every_process() -> None:
    episodes = schedule(7, 0, whole_pass(EVERYTHING), EVERYTHING)
    assert Counter(e.faults[0].name for e in episodes if len(e.faults) == 1) == {f.name: 1 for f in FAULTS}
    assert {tuple(fault.name for fault in e.faults) for e in episodes if len(e.faults) == 2} == set(PAIRS)
    assert sum(not e.faults for e in episodes) == 1
    assert {fault.target for fault in FAULTS} == TARGETS
    assert [e.wave for e in episodes] == list(range(len(episodes)))


def test_a_second_round_has_other_waves_in_another_order() -> None:
    first, second = (schedule(7, start, 10, EVERYTHING) for start in (0, 10))
    assert [e.wave for e in second] == list(range(10, 20))
    assert [e.faults for e in first] != [e.faults for e in second]


def test_a_stack_without_proxies_gets_only_faults_that_need_none() -> None:
    possible = frozenset(("nothing",))
    episodes = schedule(7, 0, 3 * whole_pass(possible), possible)
    assert {fault.needs for e in episodes for fault in e.faults} == {"nothing"}


def test_only_the_named_faults_are_made_and_an_unknown_name_is_refused() -> None:
    names = ("kill decode", "kill nats")
    chosen = {fault.name for e in schedule(7, 0, 12, EVERYTHING, names) for fault in e.faults}
    assert chosen == set(names)
    with pytest.raises(NoSuchFault, match="kill decode"):
        schedule(7, 0, 12, EVERYTHING, ("kill decod",))
    with pytest.raises(NoSuchFault):
        schedule(7, 0, 12, frozenset(("nothing",)), ("nats away",))


def test_every_wave_holds_the_whole_mix() -> None:
    for number in range(20):
        wave = wave_of_requests(11, number)
        assert [request.number for request in wave] == list(range(number * WAVE, (number + 1) * WAVE))
        assert {request.client for request in wave} == {"stream", "whole", "nats"}
        assert {request.prompt for request in wave} == {"short", "shared", "long", "repeat"}
        assert Counter(request.speculates for request in wave) == {True: WAVE // 2, False: WAVE // 2}
        assert {request.body["temperature"] == 0 for request in wave} == {True, False}
        assert any(request.choices > 1 for request in wave)
        assert any(request.readers for request in wave)
        assert {request.body["max_tokens"] for request in wave} == {OUTPUT_TOKENS}
        assert len({request.body["seed"] for request in wave}) == WAVE
    everything = [request for number in range(20) for request in wave_of_requests(11, number)]
    assert {request.body["priority"] for request in everything} == {"high", "normal", "low"}
    assert {request.api for request in everything} == {"chat", "completion"}
    assert {request.gateway for request in everything} == {0, 1}
    assert any(request.logprobs for request in everything)
    assert LONG_WORDS[0] > LONG_PROMPT_TOKENS


def struck(fault: str, gaps: list[float], **tokens: int) -> Struck:
    told = [Gap("a", "client", True, gap, 1.0) for gap in gaps]
    counts = {"lost": 0, "repeated": 0, "changed": 0, **tokens}
    return Struck(fault=fault, target="x", wave=0, at_unix_s=0, lasted_s=0, requests=["a", "b"], gaps=told, **counts)


def test_the_table_adds_up_strikes_of_a_fault_and_of_all() -> None:
    found = rows([struck("b", [1.0, 9.0], lost=2), struck("a", []), struck("b", [5.0], changed=1)])
    assert [(row.fault, row.strikes, row.requests, row.lost, row.changed) for row in found] == [
        ("a", 1, 2, 0, 0),
        ("b", 2, 4, 2, 1),
        ("all", 3, 6, 2, 1),
    ]
    assert (found[1].gap_ms.p50, found[1].gap_ms.p99, found[1].gap_ms.max) == (5.0, 9.0, 9.0)
    assert quantiles([4.0, 1.0, 3.0, 2.0]).p50 == 2.0
    report = Report(1, "now", {}, {}, struck=[struck("a", [])])
    assert b'"max": null' in encode(report)


def test_events_keep_their_ids_across_chunks_and_comments_are_none() -> None:
    stream = b'id: r:1\ndata: {"a":1}\n\n: ping\nid: r:2\r\ndata: x\r\ndata: y\r\n\r\ndata: [DONE]\n\n'
    for size in (1, 2, 7, len(stream)):
        reader = SseReader()
        chunks = [stream[at : at + size] for at in range(0, len(stream), size)]
        events = [(event.event_id, event.data) for chunk in chunks for event in reader.feed(chunk)]
        assert events == [("r:1", b'{"a":1}'), ("r:2", b"x\ny"), ("", b"[DONE]")]
