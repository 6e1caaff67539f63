"""When a request's time is over. Queue time and compute time count apart; every service computes them alike. Pure."""

from __future__ import annotations


def compute_deadline(latest_unix_s: float, compute_timeout_s: float, first_claim_unix_s: float | None) -> float:
    """The moment at which a request must have ended, in Unix seconds.

    Compute time begins with the first claim, whoever made it, and goes on through hand-overs and recoveries. Before
    that, and for a request without a time-out of its own, the latest moment of all counts.
    """
    if first_claim_unix_s is None or compute_timeout_s <= 0:
        return latest_unix_s
    return min(latest_unix_s, first_claim_unix_s + compute_timeout_s)
