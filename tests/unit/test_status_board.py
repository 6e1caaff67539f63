"""Who counts as there, and for how long a holder's word counts; time is moved by hand."""

from __future__ import annotations

import pytest
from nats.aio.msg import Msg

from shared.bus import board
from shared.bus.board import DEAF_S, ORPHANED_S, StatusBoard
from shared.protocol.status import STATUS_TTL_S, InstanceStatus, encode_status

FRESH_S = 1.8


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(board, "time", made)
    return made


async def hear(
    statuses: StatusBoard,
    instance: str,
    run: str,
    *holds: str,
    started: float = 1.0,
    sent: float = 0.0,
    state: str = "ready",
    let_go: list[str] | None = None,
) -> None:
    status = InstanceStatus(
        "decode",
        instance,
        f"{instance}.{run}",
        1,
        "h",
        started,
        sent,
        state=state,  # type: ignore[arg-type]
        holds=list(holds),
        let_go=let_go or [],
    )
    await statuses.on_status(Msg(_client=None, subject="s", data=encode_status(status)))  # type: ignore[arg-type]


async def test_a_holders_word_counts_until_it_is_stale(clock: Clock) -> None:
    statuses = StatusBoard()
    await hear(statuses, "decode-0", "a", "r")
    clock.now += 1.5
    assert statuses.holder_alive_s("decode-0.a", "r", FRESH_S) == pytest.approx(0.3)
    assert statuses.holder_alive_s("decode-0.a", "another", FRESH_S) == 0
    clock.now += 0.4
    assert statuses.holder_alive_s("decode-0.a", "r", FRESH_S) == 0


async def test_what_a_worker_said_before_its_claim_does_not_tell_that_it_is_gone(clock: Clock) -> None:
    statuses = StatusBoard()
    await hear(statuses, "decode-0", "a", sent=100.0)
    assert statuses.holder_alive_s("decode-0.a", "r", FRESH_S, 99.0) == 0
    clock.now += 1.0
    assert statuses.holder_alive_s("decode-0.a", "r", FRESH_S, 101.0) == pytest.approx(0.8)
    statuses.heard_nothing_yet()
    assert statuses.holder_alive_s("decode-0.a", "r", FRESH_S, 101.0) == pytest.approx(DEAF_S)
    clock.now += DEAF_S
    assert statuses.holder_alive_s("decode-0.a", "r", FRESH_S, 101.0) == 0


async def test_every_holder_counts_as_alive_right_after_a_connection(clock: Clock) -> None:
    statuses = StatusBoard()
    await hear(statuses, "decode-0", "a", "r")
    clock.now += 60.0  # an outage
    statuses.heard_nothing_yet()
    for worker in ("decode-0.a", "decode-7.never-heard"):
        assert statuses.holder_alive_s(worker, "r", FRESH_S) == pytest.approx(DEAF_S)
    clock.now += DEAF_S
    for worker in ("decode-0.a", "decode-7.never-heard"):
        assert statuses.holder_alive_s(worker, "r", FRESH_S) == 0


async def test_a_later_run_of_the_instance_means_that_the_earlier_is_gone(clock: Clock) -> None:
    statuses = StatusBoard()
    await hear(statuses, "decode-0", "a", "r")
    clock.now += 60.0
    statuses.heard_nothing_yet()
    await hear(statuses, "decode-0", "b")
    assert statuses.holder_alive_s("decode-0.a", "r", FRESH_S) == 0
    assert statuses.holder_alive_s("decode-1.c", "r", FRESH_S) > 0


async def test_a_run_that_still_speaks_is_alive_beside_its_successor(clock: Clock) -> None:
    """A rolling restart may start the next run before it stops the one that holds requests."""
    statuses = StatusBoard()
    await hear(statuses, "decode-0", "b", started=2.0, state="starting")
    await hear(statuses, "decode-0", "a", "r", started=1.0)
    assert statuses.holder_alive_s("decode-0.a", "r", FRESH_S) > 0
    await hear(statuses, "decode-0", "a", "r", started=1.0)
    assert [status.worker for status in statuses.live("decode")] == ["decode-0.b"], "the latest run stands for it"


async def test_instances_are_listed_once_and_forgotten_after_their_time(clock: Clock) -> None:
    statuses = StatusBoard()
    await hear(statuses, "decode-1", "x")
    await hear(statuses, "decode-0", "y")
    assert [status.instance for status in statuses.live()] == ["decode-0", "decode-1"]
    assert statuses.live("prefill") == []
    clock.now += STATUS_TTL_S + 0.1
    assert statuses.live() == []


async def test_what_is_remembered_is_bounded(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "MAX_RUNS", 10)
    statuses = StatusBoard()
    for n in range(50):
        clock.now += 1.0
        await hear(statuses, "decode-0", str(n))
    assert len(statuses._seen) <= 10


async def test_what_a_silent_run_held_is_missing_until_another_holds_it(clock: Clock) -> None:
    statuses = StatusBoard()
    await hear(statuses, "decode-0", "a", "lost", "kept")
    clock.now += FRESH_S - 0.1
    await hear(statuses, "decode-1", "b", "own")
    assert statuses.missing("decode", "", FRESH_S) == 0, "its word still counts"
    clock.now += 0.2
    assert statuses.missing("decode", "", FRESH_S) == 2
    assert statuses.missing("prefill", "", FRESH_S) == statuses.missing("decode", "m", FRESH_S) == 0
    await hear(statuses, "decode-1", "b", "own", "lost")
    assert statuses.missing("decode", "", FRESH_S) == 1
    await hear(statuses, "decode-1", "b", "own", "kept")
    assert statuses.missing("decode", "", FRESH_S) == 1, "one has ended; it may have claimed one more and not said so"
    clock.now += ORPHANED_S
    await hear(statuses, "decode-1", "b", "own", "kept")
    assert statuses.missing("decode", "", FRESH_S) == 0, "whoever wanted it has it"


async def test_what_two_dead_runs_named_is_missing_once(clock: Clock) -> None:
    statuses = StatusBoard()
    await hear(statuses, "decode-0", "a", "r")
    await hear(statuses, "decode-0", "b", "r", "s")
    clock.now += FRESH_S + 0.1
    assert statuses.missing("decode", "", FRESH_S) == 3, "two, and what the earlier run may have claimed unheard"


async def test_what_a_run_let_go_is_missing_until_another_names_it_and_it_need_not_be_dead(clock: Clock) -> None:
    statuses = StatusBoard()
    await hear(statuses, "decode-0", "a", "lost", "ended")
    await hear(statuses, "decode-0", "a", state="draining", let_go=["lost", "claimed unheard"])
    assert statuses.missing("decode", "", FRESH_S) == 2
    await hear(statuses, "decode-1", "b", "lost")
    await hear(statuses, "decode-0", "a", state="draining", let_go=["lost", "claimed unheard"])
    await hear(statuses, "decode-1", "b")
    assert statuses.missing("decode", "", FRESH_S) == 1, "what was taken over and ended is not missing again"
    statuses.heard_nothing_yet()
    assert statuses.missing("decode", "", FRESH_S) == 0, "nobody had the chance to say that it holds it"
    clock.now += FRESH_S + 0.1
    await hear(statuses, "decode-1", "b")
    assert statuses.missing("decode", "", FRESH_S) == 1, "it ended in good order and claimed nothing unheard"
    clock.now += ORPHANED_S
    await hear(statuses, "decode-1", "b")
    assert statuses.missing("decode", "", FRESH_S) == 0
