"""What a worker does with a delivery, decided from the request's log. Pure: time and liveness are passed in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shared.bus import LogState

MAX_CLAIMS_WITHOUT_PROGRESS = 5
"""A request that took this many holders with it, none of which wrote a token, is given up."""

Action = Literal["claim", "drop_ended", "renew", "wait_for_holder", "hand_on", "drop_handed_on", "too_late", "give_up"]


@dataclass(frozen=True)
class Decision:
    """`claim`: append a claim and work on it. `drop_ended`, `drop_handed_on`: ack, nothing is left to do here.
    `renew`: it is ours already. `wait_for_holder`: give back with a delay. `hand_on`: the first token exists, publish
    the decode job only. `too_late`: a deadline passed, end it. `give_up`: it ends its holders, end it.
    """

    action: Action
    reason: str = ""


def decide(  # noqa: PLR0911 - a decision table reads best as one return per row
    state: LogState,
    *,
    stage: Literal["prefill", "decode"],
    worker: str,
    held_here: bool,
    holder_alive: bool,
    now_unix_s: float,
    queue_deadline_unix_s: float,
    deadline_unix_s: float,
) -> Decision:
    """Decide about a delivery whose log stands at `state`."""
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
    if claims_without_progress(state, stage) >= MAX_CLAIMS_WITHOUT_PROGRESS:
        return Decision("give_up", "worker_crashed")
    return Decision("claim")


def claims_without_progress(state: LogState, stage: Literal["prefill", "decode"]) -> int:
    """Claims of this stage since the last token whose holders did not hand the request back."""
    return sum(1 for claim in state.unproductive if claim.stage == stage)
