"""What a worker does with a delivery, for each state that a log can be in."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.bus import LogEntry, LogState
from shared.protocol.records import Accepted, Claimed, Ended, HandedBack, Record, Tokens, Usage
from shared.worker.takeover import CONVICTED_AFTER, SUSPECT_AFTER, Decision, decide

ACCEPTED = Accepted(
    request_id="r",
    tenant="t",
    model="m",
    api="chat",
    created_unix_s=0.0,
    deadline_unix_s=100.0,
    prompt_tokens=3,
    seed=0,
)


def claim(stage: str, worker: str, epoch: int = 1, *, alone: bool = False) -> Claimed:
    return Claimed(epoch=epoch, stage=stage, worker=worker, at_unix_s=0.0, alone=alone)  # type: ignore[arg-type]


def tokens(index: int) -> Tokens:
    return Tokens(epoch=1, index=index, ids=[index], text="x")


def ended() -> Ended:
    return Ended(epoch=1, reason="stop", usage=Usage(prompt_tokens=3, completion_tokens=1))


def decision(
    *records: Record,
    stage: str = "decode",
    alive: bool = False,
    held: bool = False,
    busy: bool = False,
    now: float = 1.0,
) -> Decision:
    state = LogState.replay(LogEntry(seq, record) for seq, record in enumerate((ACCEPTED, *records), start=1))
    return decide(
        state,
        stage=stage,  # type: ignore[arg-type]
        worker="me",
        held_here=held,
        holder_alive=alive,
        busy=busy,
        now_unix_s=now,
        queue_deadline_unix_s=10.0,
        deadline_unix_s=100.0,
    )


def test_new_work_is_claimed() -> None:
    assert decision(stage="prefill").action == "claim"
    assert decision(claim("prefill", "p"), tokens(0)).action == "claim"


def test_a_hand_over_whose_first_holder_is_not_named_is_claimed() -> None:
    """As decode assumes the log of a job to be, of which it knows only when prefill claimed it."""
    for alive in (True, False):
        assert decision(claim("prefill", ""), tokens(0), alive=alive).action == "claim"


def test_a_dead_holders_request_is_claimed_and_a_living_ones_is_not() -> None:
    log = (claim("prefill", "p"), tokens(0), claim("decode", "other", 2), tokens(1))
    assert decision(*log, alive=False).action == "claim"
    assert decision(*log, alive=True).action == "wait_for_holder"


def test_decode_does_not_wait_for_the_prefill_worker_that_handed_over() -> None:
    assert decision(claim("prefill", "p"), tokens(0), alive=True).action == "claim"


def test_a_redelivery_to_the_holder_itself_is_a_renewal() -> None:
    assert decision(claim("decode", "me"), held=True, alive=True).action == "renew"
    assert decision(claim("decode", "me"), held=False).action == "claim"


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_ended_requests_are_dropped_whoever_holds_them(stage: str) -> None:
    assert decision(claim("decode", "me"), ended(), stage=stage, held=True, alive=True).action == "drop_ended"


def test_prefill_hands_on_a_first_token_that_it_finds_and_drops_what_decode_has() -> None:
    assert decision(claim("prefill", "dead"), tokens(0), stage="prefill").action == "hand_on"
    assert decision(claim("prefill", "dead"), tokens(0), claim("decode", "d", 2), stage="prefill").action == (
        "drop_handed_on"
    )


def test_only_unclaimed_work_ends_by_its_queue_deadline() -> None:
    assert decision(stage="prefill", now=11.0) == Decision("too_late", "queue_timeout")
    assert decision(claim("prefill", "dead"), stage="prefill", now=11.0).action == "claim"
    assert decision(claim("prefill", "dead"), stage="prefill", now=101.0) == Decision("too_late", "deadline_exceeded")


BEGUN: tuple[Record, ...] = (claim("prefill", "p"), tokens(0))


def crashes(number: int, *, alone: bool = False, first_epoch: int = 2) -> list[Record]:
    return [claim("decode", f"w{n}", n + first_epoch, alone=alone) for n in range(number)]


def test_a_suspect_runs_alone_and_waits_until_it_can() -> None:
    assert decision(*BEGUN, *crashes(SUSPECT_AFTER - 1), busy=True).action == "claim"
    assert decision(*BEGUN, *crashes(SUSPECT_AFTER)).action == "claim_alone"
    assert decision(*BEGUN, *crashes(SUSPECT_AFTER), busy=True).action == "wait_for_turn"


def test_only_crashes_while_alone_convict() -> None:
    together = crashes(20)
    assert decision(*BEGUN, *together).action == "claim_alone"
    once = [*together, *crashes(CONVICTED_AFTER - 1, alone=True, first_epoch=30)]
    assert decision(*BEGUN, *once).action == "claim_alone"
    convicted = [*together, *crashes(CONVICTED_AFTER, alone=True, first_epoch=30)]
    for busy in (True, False):
        assert decision(*BEGUN, *convicted, busy=busy) == Decision("give_up", "worker_crashed")


def test_a_suspect_that_makes_progress_is_none_any_more() -> None:
    suspected = [*crashes(SUSPECT_AFTER), *crashes(1, alone=True, first_epoch=9)]
    assert decision(*BEGUN, *suspected, tokens(1), busy=True).action == "claim"
    begun_again = [*suspected, tokens(1), *crashes(1, alone=True, first_epoch=11)]
    assert decision(*BEGUN, *begun_again, busy=True).action == "claim"


def test_a_hand_back_is_no_crash_whether_alone_or_not() -> None:
    restarts: list[Record] = []
    for n in range(9):
        restarts += [
            claim("decode", f"w{n}", n + 9, alone=n % 2 == 0),
            HandedBack(epoch=n + 9, stage="decode", worker=f"w{n}"),
        ]
    assert decision(*BEGUN, *restarts, busy=True).action == "claim"
    assert decision(*BEGUN, *crashes(SUSPECT_AFTER), *restarts).action == "claim_alone"


def test_a_stage_answers_for_its_own_crashes_only() -> None:
    """Prefill that crashed and then wrote its token, or that never did, says nothing about decode."""
    deaths = [claim("prefill", f"p{n}", n + 1, alone=n > 1) for n in range(4)]
    assert decision(*deaths, stage="prefill").action == "give_up"
    assert decision(*deaths, claim("decode", "d", 9), stage="decode", busy=True).action == "claim"


def test_a_suspect_is_not_taken_from_a_living_holder_nor_run_past_its_deadline() -> None:
    suspected = [*BEGUN, *crashes(SUSPECT_AFTER + 1, alone=True)]
    for busy in (True, False):
        assert decision(*suspected, alive=True, busy=busy).action == "wait_for_holder"
        assert decision(*suspected, busy=busy, now=100.0).action == "too_late"


def test_a_worker_that_still_cleans_up_a_lost_request_does_not_claim_it_again() -> None:
    assert decision(claim("decode", "me"), claim("decode", "other", 2), held=True).action == "wait_for_holder"


item = st.one_of(
    st.builds(
        claim,
        st.sampled_from(["prefill", "decode"]),
        st.sampled_from(["p", "me", "other"]),
        alone=st.booleans(),
    ),
    st.sampled_from(["token", "back", "end"]),
)


def log_of(drawn: list[Claimed | str]) -> list[Record]:
    """Records as workers could have written them, in the order drawn: epochs grow, hand-backs are of the last claim."""
    log: list[Record] = []
    index = 0
    holder: Claimed | None = None
    for what in drawn:
        if isinstance(what, Claimed):
            holder = msgspec.structs.replace(what, epoch=holder.epoch + 1 if holder else 1)
            log.append(holder)
        elif what == "token":
            log.append(tokens(index))
            index += 1
        elif what == "back" and holder is not None:
            log.append(HandedBack(epoch=holder.epoch, stage=holder.stage, worker=holder.worker))
        elif what == "end":
            log.append(ended())
            break
    return log


logs = st.lists(item, max_size=14).map(log_of)
stages = st.sampled_from(["prefill", "decode"])


@given(logs, st.booleans(), st.booleans(), st.booleans(), st.floats(0, 200), stages)
def test_nothing_is_ever_claimed_after_the_end_or_the_deadline_or_from_a_living_holder(
    log: list[Record], alive: bool, held: bool, busy: bool, now: float, stage: str
) -> None:
    result = decision(*log, stage=stage, alive=alive, held=held, busy=busy, now=now)
    if any(isinstance(r, Ended) for r in log):
        assert result.action == "drop_ended"
    if result.action in ("claim", "claim_alone"):
        assert now < 100.0
        last = next((r for r in reversed(log) if isinstance(r, Claimed)), None)
        assert last is None or last.worker == "me" or last.stage != stage or not alive


@given(logs, st.booleans(), stages)
def test_only_what_crashed_without_progress_is_set_apart_and_only_what_crashed_alone_is_given_up(
    log: list[Record], busy: bool, stage: str
) -> None:
    result = decision(*log, stage=stage, busy=busy)
    since = max((i + 1 for i, r in enumerate(log) if isinstance(r, Tokens)), default=0)
    back = {r.epoch for r in log if isinstance(r, HandedBack)}
    crashed = [r for r in log[since:] if isinstance(r, Claimed) and r.stage == stage and r.epoch not in back]
    if result.action == "give_up":
        assert sum(c.alone for c in crashed) >= CONVICTED_AFTER
    if result.action in ("claim_alone", "wait_for_turn"):
        assert len(crashed) >= SUSPECT_AFTER
        assert sum(c.alone for c in crashed) < CONVICTED_AFTER
        assert (result.action == "wait_for_turn") == busy
    if result.action == "claim":
        assert len(crashed) < SUSPECT_AFTER


@given(st.lists(st.sampled_from(["crash", "hand_back", "token"]), max_size=40))
def test_a_request_crashes_four_workers_at_most_between_two_tokens(fates: list[str]) -> None:
    """Whatever happens to its holders, who claim as they are told to."""
    log: list[Record] = list(BEGUN)
    crashed, index = 0, 1
    for epoch, fate in enumerate(fates, start=2):
        told = decision(*log)
        if told.action == "give_up":
            break
        holder = claim("decode", f"w{epoch}", epoch, alone=told.action == "claim_alone")
        log.append(holder)
        if fate == "token":
            log.append(tokens(index))
            index, crashed = index + 1, 0
        elif fate == "hand_back":
            log.append(HandedBack(epoch=epoch, stage="decode", worker=holder.worker))
        else:
            crashed += 1
        assert crashed <= SUSPECT_AFTER + CONVICTED_AFTER
