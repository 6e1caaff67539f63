"""The parts of the speculation benchmark that need no stack: workloads by seed, paces, intervals, counters, table."""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Callable, Sequence
from statistics import median

import msgspec
import pytest
import typer
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console
from typer.testing import CliRunner

from loadgen.chaos.observer import Entry
from loadgen.chaos.reading import Shown
from loadgen.spec_bench.client import Answered, Round
from loadgen.spec_bench.command import CONCURRENCIES, PAIRS, chosen_concurrencies, chosen_workloads, spec_command
from loadgen.spec_bench.counters import parse, risen
from loadgen.spec_bench.report import Cell, PeerCell, Proposed, Report, encode, proposers_of, show_cells, show_peers
from loadgen.spec_bench.run import WAVES, Plan, differences, figures
from loadgen.spec_bench.statistics import Arrival, Interval, Pace, Timing, arrivals, interval, pace, timing
from loadgen.spec_bench.workloads import MOST_CHATS, WORKLOADS, Size, WorkloadName, repeated_share, script
from shared.protocol.records import Accepted, Claimed, Ended, Record, Tokens, Usage
from shared.telemetry.metrics import DecodeMetrics

SIZE = Size()


def log(*records: Record) -> list[Entry]:
    """With gaps between sequences, as other logs share the stream."""
    return [Entry(10 + 3 * n, record) for n, record in enumerate(records)]


def shown(entry: Entry, at_s: float, text: str = "x") -> Shown:
    return Shown(at_s, 0, entry.seq, text)


def answered(ids: Sequence[int], *, drafted: int = 0, accepted: int = 0, text: str = "", times: int = 2) -> Answered:
    arrived = [Arrival(float(n), len(ids) // times) for n in range(times)]
    return Answered(list(ids), text, "length", arrived, drafted, accepted, steps=2)


def cell(**changes: object) -> Cell:
    fields = {
        "workload": "edit", "concurrency": 4, "without_tokens_per_s": 40.0, "with_tokens_per_s": 90.0,
        "speed_up": Interval(2.25, 2.1, 2.4, 9), "ratios": [2.25] * 9, "by_the_clock": Interval(2.15, 2.0, 2.3, 9),
        "at_once_without": 3.8, "at_once_with": 3.5, "output_tokens": 900, "drafted_tokens": 600,
        "accepted_tokens": 450, "tokens_per_step": 2.5, "accepted_length": None, "ready": None, "repeated": 0.96,
        "proposers": {"draft_model": Proposed(150, 90), "lookup": Proposed(450, 360)},
    }  # fmt: skip
    return msgspec.convert(msgspec.to_builtins(fields) | changes, Cell)


def printed(show: Callable[[Console], None]) -> list[str]:
    console = Console(width=180, file=io.StringIO(), record=True)
    show(console)
    return console.export_text().splitlines()


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_seed_repeats_a_workload_and_another_seed_does_not(workload: WorkloadName) -> None:
    assert [script(workload, SIZE, 5, n) for n in range(6)] == [script(workload, SIZE, 5, n) for n in range(6)]
    assert all(script(workload, SIZE, 5, n) != script(workload, SIZE, 6, n) for n in range(6))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_no_question_of_a_whole_run_comes_twice(workload: WorkloadName) -> None:
    scripts = [script(workload, SIZE, 1, n) for n in range(MOST_CHATS)]
    assert len({one.opening for one in scripts}) == len(scripts)


@pytest.mark.parametrize("workload", ["chat", "chat-sampled"])
def test_no_chat_is_asked_again_when_all_were(workload: WorkloadName) -> None:
    with pytest.raises(IndexError, match=str(MOST_CHATS)):
        script(workload, SIZE, 1, MOST_CHATS)


def test_a_usual_run_has_scripts_enough_and_one_that_has_not_is_refused() -> None:
    usual = Plan(PAIRS, WORKLOADS, CONCURRENCIES, SIZE, 1)
    assert usual.scripts == (1 + 9) * (1 + 4 * WAVES + 8 * WAVES) <= MOST_CHATS
    app = typer.Typer()
    app.command()(spec_command)
    refused = CliRunner().invoke(app, ["--pairs", "40"])
    assert refused.exit_code == 2
    assert "fewer pairs" in refused.output


def test_greedy_and_sampled_chats_of_a_run_share_no_question() -> None:
    asked = [{script(name, SIZE, 1, n).opening for n in range(MOST_CHATS)} for name in ("chat", "chat-sampled")]
    assert not asked[0] & asked[1]


def test_chats_are_stories_and_questions_in_the_api_for_chats() -> None:
    body = script("chat", SIZE, 1, 0).body([])
    assert body["messages"][0]["content"].startswith("Write a story about")
    assert body["temperature"] == 0
    assert script("chat-sampled", SIZE, 1, 1).body([])["temperature"] == 0.7


def test_an_edit_gives_the_text_that_is_to_be_repeated() -> None:
    prose, code = script("edit", SIZE, 1, 0), script("edit", SIZE, 1, 1)
    assert prose.given not in prose.opening  # it has mistakes there
    assert repeated_share(prose.opening, prose.given) > 0.9
    assert code.given in code.opening
    assert 90 < len(prose.given.split()) < 150


def test_each_turn_of_the_agent_repeats_the_whole_prompt_before_it() -> None:
    one = script("agent", SIZE, 1, 3)
    answers = [f"answer {n}" for n in range(one.turns - 1)]
    prompts = [one.prompt(answers[:n]) for n in range(one.turns)]
    assert len(prompts) == SIZE.turns
    for n, (earlier, later) in enumerate(itertools.pairwise(prompts)):
        assert later.startswith(earlier + answers[n])
        assert later.endswith('"seen": "')
        assert f'"step": {n + 4}' in later.removeprefix(earlier)


def test_the_repeated_share_counts_words_in_order() -> None:
    assert repeated_share("a b c d", "a b c d") == 1
    assert repeated_share("a b c d", "a x c d") == 0.75
    assert repeated_share("a b c d", "d c b a") == 0.25
    assert repeated_share("a b", "") == 0


def test_tokens_count_when_the_client_saw_them_and_held_back_ones_with_the_next_event() -> None:
    entries = log(
        Accepted("r", "t", "m", "chat", 0, 0, 5, 1),
        Claimed(1, "prefill", "w", 0),
        Tokens(1, 0, [1], "a"),
        Claimed(2, "decode", "w", 0),
        Tokens(2, 1, [2, 3], ""),  # no text, so no event
        Tokens(2, 3, [4, 5, 6], "bc"),
        Tokens(2, 6, [7], ""),
        Ended(2, "stop", Usage(5, 7)),
    )
    seen = [shown(entries[0], 0.5, ""), shown(entries[2], 1.0), shown(entries[5], 2.0), shown(entries[7], 2.5, "")]
    assert arrivals(seen, entries) == [Arrival(1.0, 1), Arrival(2.0, 5), Arrival(2.5, 1)]


def test_a_pace_is_that_of_each_stream_behind_its_first_token() -> None:
    alone = [Arrival(1.0, 1), Arrival(1.5, 4), Arrival(3.0, 2)]
    later = [Arrival(2.0, 1), Arrival(5.0, 9)]
    assert pace([alone]) == Pace(6, 2.0)
    assert pace([later, alone]) == Pace(15, 5.0)
    assert pace([[Arrival(1.0, 1)], []]).tokens_per_s == 0
    assert (Pace(6, 2.0) + Pace(15, 5.0)).tokens_per_s == pytest.approx(3.0)


def test_a_pace_leaves_out_what_came_before_all_were_at_work_and_after_one_was_done() -> None:
    streams = [[Arrival(float(t), 1) for t in range(10)], [Arrival(t + 0.5, 2) for t in range(4)]]
    assert pace(streams, since_s=2.0, until_s=6.0) == Pace(4 + 2, 4.0 + 1.0)
    even = [[Arrival(t / 10, 1) for t in range(100)]] * 8
    assert 8 * pace(even, 1.0, 8.0).tokens_per_s == pytest.approx(80.0), "what the eight bring together"


def test_a_round_counts_what_came_while_all_clients_were_at_work() -> None:
    def stream(speed: float, start_s: float) -> Answered:
        came = [Arrival(start_s + n / speed, 1) for n in range(101)]
        return Answered(list(range(101)), "", "length", came, 0, 0, 100)

    answers = [[stream(30, 0.0)], [stream(10, 0.0)], [stream(30, 3.4)]]
    found = Round(answers, since_s=0.0, until_s=6.8)
    assert 2 * found.timing.streams.tokens_per_s == pytest.approx(40, rel=0.02)
    assert Round(answers[:1], 0.0, 9.0).timing.streams.tokens_per_s == pytest.approx(30)


def test_by_the_clock_waits_between_requests_count_too() -> None:
    first = [Arrival(float(t), 3) for t in range(5)]
    second = [Arrival(6.0 + t, 3) for t in range(5)]  # two seconds of waiting for its first token
    beside = [Arrival(float(t), 1) for t in range(11)]
    found = timing([first, second, beside], since_s=0.0, until_s=10.0)
    assert found.clock == Pace(4 * 3 + 5 * 3 + 10, 10.0)
    assert found.at_once == pytest.approx(1.8)
    assert timing([beside], 2.0, 6.0).clock == Pace(4, 4.0)
    assert timing([], 3.0, 2.0) == Timing(Pace(), Pace(0, 0.0))
    assert Timing().at_once == 0


def test_the_interval_holds_the_median_and_narrows_with_more_pairs() -> None:
    rng = random.Random(1)
    many = [rng.gauss(2.0, 0.2) for _ in range(200)]
    wide, narrow = interval(many[:9], 7), interval(many, 7)
    assert wide.median == median(many[:9])
    assert min(many[:9]) <= wide.low <= wide.median <= wide.high <= max(many[:9])
    assert narrow.high - narrow.low < wide.high - wide.low
    assert interval(many[:9], 7) == wide
    assert interval([1.5], 7) == Interval(1.5, 1.5, 1.5, 1)
    assert interval([], 7) == Interval()


def test_what_the_decode_worker_counts_is_found_by_proposer() -> None:
    metrics = DecodeMetrics("decode-0", registry := CollectorRegistry())
    metrics.speculation.observe("lookup", 5, 3)
    before = parse(generate_latest(registry).decode())
    metrics.speculation.observe("lookup", 10, 4)
    metrics.speculation.observe("draft_model", 6, 6)
    grown = risen(before, parse(generate_latest(registry).decode()))
    assert proposers_of(grown) == {"lookup": Proposed(10, 4), "draft_model": Proposed(6, 6)}
    assert not any(name.startswith("headrace_engine") for name in grown)


def test_a_worker_that_began_again_at_zero_counts_what_it_has() -> None:
    assert risen({"a_total": 50.0, "b_total": 2.0}, {"a_total": 3.0, "b_total": 2.0}) == {"a_total": 3.0}


def test_other_ids_and_drafts_of_the_side_without_speculation_are_told() -> None:
    same = differences("edit 0.0", [3], [answered([1, 2, 3, 4])], [answered([1, 2, 3, 4], drafted=4, accepted=2)])
    assert same == []
    (other,) = differences("edit 0.0", [3], [answered([1, 2, 3, 4])], [answered([1, 2, 9, 4])])
    assert "script 3" in other
    assert "from token 2 on" in other
    (shorter,) = differences("edit 0.0", [3], [answered([1, 2, 3, 4])], [answered([1, 2])])
    assert "from token 2 on (4 and 2 tokens)" in shorter
    (text,) = differences("edit 0.0", [3], [answered([1, 2])], [answered([1, 2], text="b")])
    assert "other text" in text
    (drafted,) = differences("edit 0.0", [3], [answered([1, 2], drafted=1)], [answered([1, 2])])
    assert "speculation was off" in drafted


def test_figures_are_medians_over_pairs_and_sums_over_requests() -> None:
    without = [Timing(Pace(100, s), Pace(100, s + 1.0)) for s in (2.0, 4.0, 5.0)] + [Timing()]
    ours = [Timing(Pace(100, s), Pace(100, s + 1.0)) for s in (1.0, 2.0, 1.0, 1.0)]
    found = figures(
        "agent",
        1,
        without,
        ours,
        [answered(range(21), drafted=20, accepted=15)] * 4,
        repeated=[0.5, 1.0],
        differing=[],
        counters={
            'headrace_spec_decode_num_drafts_total{proposer="lookup"}': 15.0,
            'headrace_spec_decode_num_drafts_total{proposer="draft_model"}': 5.0,
            "headrace_spec_decode_num_sequence_steps_total": 40.0,
            "headrace_spec_decode_num_ready_sequence_steps_total": 30.0,
        },
        seed=1,
    )
    assert found.ratios == [2.0, 2.0, 5.0]  # the last pair had nothing to time
    assert found.speed_up.median == 2.0
    assert found.by_the_clock.median == pytest.approx(5 / 3)
    assert found.at_once_without == pytest.approx(0.8)
    assert found.at_once_with == 0.5
    assert (found.drafted_tokens, found.accepted_tokens, found.acceptance) == (80, 60, 0.75)
    assert found.tokens_per_step == 10.0
    assert (found.accepted_length, found.ready) == (4.0, 0.75)
    assert found.repeated == 0.75


def test_the_table_shows_each_cell_with_the_share_of_each_proposer() -> None:
    plain = cell(workload="chat", proposers={}, drafted_tokens=0, repeated=None, differing=["chat 0.0: ids differ"])
    lines = printed(lambda to: show_cells(to, [cell(accepted_length=3.5, ready=0.8), plain]))
    assert any("draft model" in line and "lookup" in line for line in lines)
    edit = next(line for line in lines if line.strip().startswith("edit"))
    assert edit.split() == [
        "edit", "4", "40.0", "90.0", "2.25", "[2.10,", "2.40]", "2.15", "9", "2.50", "3.50", "80%", "600", "75%", "25%",
        "75%", "96%", "equal",
    ]  # fmt: skip
    chat = next(line for line in lines if line.strip().startswith("chat"))
    assert chat.split()[-2:] == ["-", "differ"]
    peers = printed(lambda to: show_peers(to, [PeerCell("edit", "plain", 7.5, Interval(1, 1, 1, 3), 1.0)], 1))
    assert any(line.split()[:3] == ["plain", "edit", "7.5"] for line in peers)


def test_the_report_survives_its_own_encoding_and_knows_what_differed() -> None:
    report = Report({"seed": 1}, [cell(), cell(differing=["edit 0.0: ids differ"])])
    again = msgspec.json.decode(encode(report), type=Report)
    assert again == report
    assert again.differing == ["edit 0.0: ids differ"]


def test_options_name_what_there_is() -> None:
    assert chosen_workloads("") == list(WORKLOADS)
    assert chosen_workloads("agent, chat") == ["chat", "agent"]
    assert chosen_concurrencies("") == [1, 4, 8]
    assert chosen_concurrencies("8,2") == [2, 8]
    for wrong in ("0", "x", "65", "-1"):
        with pytest.raises(typer.BadParameter):
            chosen_concurrencies(wrong)
    with pytest.raises(typer.BadParameter):
        chosen_workloads("chats")
