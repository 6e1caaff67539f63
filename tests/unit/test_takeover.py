"""What a worker does with a delivery, for each state that a log can be in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.bus import LogEntry, LogState
from shared.protocol.records import Accepted, Claimed, Ended, HandedBack, Record, Tokens, Usage
from shared.worker.takeover import MAX_CLAIMS_WITHOUT_PROGRESS, Decision, decide

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


def claim(stage: str, worker: str, epoch: int = 1) -> Claimed:
    return Claimed(epoch=epoch, stage=stage, worker=worker, at_unix_s=0.0)  # type: ignore[arg-type]


def tokens(index: int) -> Tokens:
    return Tokens(epoch=1, index=index, ids=[index], text="x")


def ended() -> Ended:
    return Ended(epoch=1, reason="stop", usage=Usage(prompt_tokens=3, completion_tokens=1))


def decision(
    *records: Record, stage: str = "decode", alive: bool = False, held: bool = False, now: float = 1.0
) -> Decision:
    state = LogState.replay(LogEntry(seq, record) for seq, record in enumerate((ACCEPTED, *records), start=1))
    return decide(
        state,
        stage=stage,  # type: ignore[arg-type]
        worker="me",
        held_here=held,
        holder_alive=alive,
        now_unix_s=now,
        queue_deadline_unix_s=10.0,
        deadline_unix_s=100.0,
    )


def test_new_work_is_claimed() -> None:
    assert decision(stage="prefill").action == "claim"
    assert decision(claim("prefill", "p"), tokens(0)).action == "claim"


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


def test_a_request_that_ends_its_holders_is_given_up_and_progress_resets_the_count() -> None:
    deaths = [claim("decode", f"w{n}", n + 2) for n in range(MAX_CLAIMS_WITHOUT_PROGRESS)]
    begun = (claim("prefill", "p"), tokens(0))
    assert decision(*begun, *deaths[:-1]).action == "claim"
    assert decision(*begun, *deaths).action == "give_up"
    assert decision(*begun, *deaths, tokens(1)).action == "claim"


def test_a_hand_back_is_no_crash() -> None:
    begun = (claim("prefill", "p"), tokens(0))
    restarts: list[Record] = []
    for n in range(2 * MAX_CLAIMS_WITHOUT_PROGRESS):
        restarts += [claim("decode", f"w{n}", n + 2), HandedBack(epoch=n + 2, stage="decode", worker=f"w{n}")]
    assert decision(*begun, *restarts).action == "claim"


def test_a_worker_that_still_cleans_up_a_lost_request_does_not_claim_it_again() -> None:
    assert decision(claim("decode", "me"), claim("decode", "other", 2), held=True).action == "wait_for_holder"


records = st.lists(
    st.sampled_from([claim("prefill", "p"), claim("decode", "me"), claim("decode", "other"), "token", ended()]),
    max_size=12,
)


@given(records, st.booleans(), st.booleans(), st.floats(0, 200), st.sampled_from(["prefill", "decode"]))
def test_nothing_is_ever_claimed_after_the_end_or_the_deadline_or_from_a_living_holder(
    drawn: list[Record | str], alive: bool, held: bool, now: float, stage: str
) -> None:
    log: list[Record] = []
    index = 0
    for item in drawn:
        if isinstance(item, str):
            log.append(tokens(index))
            index += 1
        else:
            log.append(item)
    result = decision(*log, stage=stage, alive=alive, held=held, now=now)
    if any(isinstance(r, Ended) for r in log):
        assert result.action == "drop_ended"
    if result.action == "claim":
        assert now < 100.0
        last = next((r for r in reversed(log) if isinstance(r, Claimed)), None)
        assert last is None or last.worker == "me" or last.stage != stage or not alive
