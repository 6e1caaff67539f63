"""What a worker does with a delivery, decided from the request's log. Pure: time and liveness are passed in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shared.bus import LogState
from shared.protocol.records import Claimed

SUSPECT_AFTER = 2
"""After this many claims without progress the request may be what crashes its holders, and runs alone."""

CONVICTED_AFTER = 2
"""This many claims without progress by workers that served nothing else prove it."""

WorkStage = Literal["prefill", "decode"]

Action = Literal[
    "claim",
    "claim_alone",
    "wait_for_turn",
    "drop_ended",
    "renew",
    "wait_for_holder",
    "hand_on",
    "drop_handed_on",
    "too_late",
    "give_up",
]


@dataclass(frozen=True)
class Decision:
    """`claim`: append a claim and work on it. `claim_alone`: the same, and serve nothing else before it has made
    progress. `wait_for_turn`: keep it until this worker serves nothing else, and take on nothing new. `drop_ended`,
    `drop_handed_on`: ack, nothing is left to do here. `renew`: it is ours already. `wait_for_holder`: give back with a
    delay. `hand_on`: the first token exists, publish the decode job only. `too_late`: a deadline passed, end it.
    `give_up`: it crashes its holders, end it and bury it.
    """

    action: Action
    reason: str = ""


def decide(  # noqa: PLR0911 - a decision table reads best as one return per row
    state: LogState,
    *,
    stage: WorkStage,
    worker: str,
    held_here: bool,
    holder_alive: bool,
    busy: bool,
    now_unix_s: float,
    queue_deadline_unix_s: float,
    deadline_unix_s: float,
) -> Decision:
    """Decide about a delivery whose log stands at `state`. `busy`: this worker serves other requests."""
    if state.ended is not None:
        return Decision("drop_ended")
    holder = state.holder
    if held_here:  # if the log names another holder, this worker is still cleaning up after losing the request
        return Decision("renew" if holder is not None and holder.worker == worker else "wait_for_holder")
    if stage == "prefill" and holder is not None and holder.stage == "decode":
        return Decision("drop_handed_on")
    if holder is not None and holder.stage == stage and holder.worker != worker and holder_alive:
        return Decision("wait_for_holder")
    if now_unix_s >= deadline_unix_s:
        return Decision("too_late", "deadline_exceeded")
    if stage == "prefill" and holder is None and now_unix_s >= queue_deadline_unix_s:
        return Decision("too_late", "queue_timeout")
    if stage == "prefill" and state.output_ids:
        return Decision("hand_on")
    crashed = crashed_claims(state, stage)
    if sum(claim.alone for claim in crashed) >= CONVICTED_AFTER:
        return Decision("give_up", "worker_crashed")
    if len(crashed) >= SUSPECT_AFTER:
        return Decision("wait_for_turn" if busy else "claim_alone")
    return Decision("claim")


def crashed_claims(state: LogState, stage: WorkStage) -> list[Claimed]:
    """Claims of this stage since the last token that were not handed back; when nobody holds it now, all crashed."""
    return [claim for claim in state.unproductive if claim.stage == stage]
