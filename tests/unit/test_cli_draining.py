"""What is said of instances that were asked to end, and of those who depended on them."""

from __future__ import annotations

from pathlib import Path

from services.cli.draining import WITHOUT, Ending, bereaved, faults
from services.cli.home import Home
from services.cli.overview import Row
from services.cli.spec import StackSpec
from shared.protocol.subjects import STAGES
from tests.unit.test_cli_spec import spec


def row(name: str, state: str = "ready") -> Row:
    return Row(name, name.rpartition("-")[0], state, 1, 0.0, "", None)


def lines(names: list[str], rows: list[Row], stack: StackSpec | None = None) -> list[str]:
    return bereaved(rows, names, stack or spec(decode=2, gateway=2))


def test_an_instance_that_ended_with_0_or_did_not_run_is_no_fault() -> None:
    home = Home(Path("/s"))
    ended = Ending("decode-0", 1.0, 0, 75)
    assert faults([ended, Ending("decode-1", 0.0, None, 75), Ending("decode-2", 0.1, -15, 75)], home) == ""
    said = faults([ended, Ending("decode-1", 2.0, 3, 75), Ending("decode-2", 75.2, -9, 75)], home)
    assert "decode-0" not in said
    assert "decode-1 ended in 2.0 s with exit status 3" in said
    assert "decode-2 was killed after 75.2 s (it has 75 s to hand its work back)" in said
    assert "/s/logs/decode-1.log, /s/logs/decode-2.log" in said
    assert "\n" not in said


def test_an_end_that_nobody_asked_for_is_a_fault_unless_it_was_in_order() -> None:
    home = Home(Path("/s"))
    assert faults([Ending("decode-0", 0.1, 0, 35, by_itself=True)], home) == ""
    for status, manner in ((1, "with exit status 1"), (-11, "by signal 11"), (-15, "by signal 15"), (None, "nobody")):
        said = faults([Ending("decode-0", 0.1, status, 35, by_itself=True)], home)
        assert f"decode-0 had ended by itself before it was asked to, {manner}" in said


def test_who_waits_is_said_only_where_no_other_instance_is_live() -> None:
    both = [row("decode-0"), row("decode-1")]
    assert lines(["decode-0"], both) == []
    assert lines(["decode-0", "decode-1"], both) == [f"no other decode instance is live: {WITHOUT['decode']}"]
    assert lines(["decode-0"], [row("decode-0"), row("decode-1", "starting")]) != []
    assert lines(["decode-0"], [row("decode-0"), row("prefill-0")]) != []
    assert lines(["decode-0"], [row("decode-0"), row("decode-elsewhere")]) == []


def test_a_gateway_is_missed_at_its_port_whoever_else_is_live() -> None:
    gateways = [row("gateway-0"), row("gateway-1")]
    assert lines(["gateway-1"], gateways) == ["nobody answers at http://127.0.0.1:8001 until gateway-1 returns"]


def test_every_stage_has_a_word_on_what_happens_without_it() -> None:
    for stage in STAGES:
        assert len(lines([f"{stage}-0"], [row(f"{stage}-0")])) == 1
