"""Drafters are asked as long as what they say is of use, and seldom when it is not."""

from __future__ import annotations

from services.decode.demand import LEAST, SELDOM, Demand


def asked(demand: Demand, turns: int, used_each: float) -> int:
    """Of so many turns; of those asked that share is verified, spread evenly."""
    found, debt = 0, 0.0
    for _ in range(turns):
        if demand.ask():
            found += 1
            debt += used_each
            while debt >= 1:
                demand.used()
                debt -= 1
    return found


def test_what_is_used_often_enough_is_always_asked_for() -> None:
    demand = Demand()
    assert asked(demand, 1000, 2 * LEAST) == 1000
    assert demand.pays


def test_what_hardly_ever_is_used_is_asked_for_now_and_then_and_found_out_when_that_changes() -> None:
    demand = Demand()
    asked(demand, 200, LEAST / 4)
    assert not demand.pays
    assert asked(demand, 100 * SELDOM, LEAST / 4) == 100
    asked(demand, 20 * SELDOM, 3 * LEAST)
    assert demand.pays
    assert asked(demand, 100, 3 * LEAST) == 100
