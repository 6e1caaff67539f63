"""Signals that ask the foreground command to end are neither lost nor noticed too late."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from services.cli.interrupts import Interrupted, Interrupts


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_is_counted_and_breaks_off_only_what_asks_for_it() -> None:
    with Interrupts.install() as interrupts:
        press()
        press()
        assert interrupts.count == 2


def test_a_signal_breaks_off_at_once_where_it_may() -> None:
    reached: list[str] = []

    def work() -> None:
        with interrupts.raising():
            press()
            reached.append("the next line")

    with Interrupts.install() as interrupts, pytest.raises(Interrupted):
        work()
    assert reached == []


def test_a_signal_that_somebody_swallowed_is_raised_at_the_end() -> None:
    def work() -> None:
        with interrupts.raising(), contextlib.suppress(BaseException):
            press()

    with Interrupts.install() as interrupts, pytest.raises(Interrupted):
        work()


def test_a_signal_that_came_before_is_raised_at_the_start_and_one_that_is_known_is_not() -> None:
    with Interrupts.install() as interrupts:
        press()
        with interrupts.raising(beyond=1):
            pass
        with pytest.raises(Interrupted), interrupts.raising():
            pytest.fail("was entered")


def test_the_former_handlers_are_back_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts.install():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
