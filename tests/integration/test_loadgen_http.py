"""The load generator against a real HTTP server of known behaviour: counts, errors, goodput, the order of figures."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.scripted_server import TEMPLATE_TOKENS, ScriptedServer, Seen, scripted_server

Report = dict[str, Any]


@pytest.fixture(scope="module")
def running() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield server


@pytest.fixture
def server(running: ScriptedServer) -> ScriptedServer:
    running.seen = Seen()
    return running


@pytest.fixture
def load(server: ScriptedServer, tmp_path: Path) -> Any:
    """Runs the command as users do and gives back its JSON report."""

    def run(*arguments: str, status: int = 0) -> Report:
        output = tmp_path / "report.json"
        command = [
            sys.executable,
            "-m",
            "loadgen",
            *arguments,
            "--url",
            server.url,
            "--json",
            str(output),
            "--warmup",
            "0",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        report: Report = json.loads(output.read_bytes())
        return report

    return run


def test_a_closed_loop_keeps_its_concurrency_and_counts_every_token(load: Any, server: ScriptedServer) -> None:
    (phase,) = load("--concurrency", "4", "--requests", "20", "--prompt-tokens", "50", "--output-tokens", "10")[
        "phases"
    ]
    assert (phase["sent"], phase["succeeded"], phase["errors"]) == (20, 20, {})
    assert phase["output_tokens"] == 200
    assert phase["input_tokens"] == 20 * 50
    assert phase["cached_input_tokens"] == 60
    assert phase["finish_reasons"] == {"length": 20}
    assert server.seen.most_running == 4
    assert (phase["ttft_ms"]["n"], phase["itl_ms"]["n"], phase["tpot_ms"]["n"]) == (20, 20 * 9, 20)
    for figure in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        assert 5 <= phase[figure]["p50"] <= phase[figure]["p95"] <= phase[figure]["p99"] <= phase[figure]["max"]
    assert phase["ttft_ms"]["p50"] < phase["e2e_ms"]["p50"]


def test_prompt_lengths_are_met_whatever_the_template_costs(load: Any, server: ScriptedServer) -> None:
    load("--requests", "4", "--prompt-tokens", "90")
    assert {len(body["messages"][0]["content"].split()) for body in server.seen.bodies[2:]} == {90 - TEMPLATE_TOKENS}


def test_a_seed_repeats_the_whole_load(load: Any, server: ScriptedServer) -> None:
    options = [
        "--requests",
        "6",
        "--prompt-tokens",
        "uniform:12:40",
        "--output-tokens",
        "lognormal:5:0.5:12",
        "--concurrency",
        "1",
    ]
    load(*options, "--seed", "7")
    first, server.seen = server.seen.bodies, Seen()
    load(*options, "--seed", "7")
    second, server.seen = server.seen.bodies, Seen()
    load(*options, "--seed", "8")
    assert first == second
    assert first[2:] != server.seen.bodies[2:]


def test_every_kind_of_failure_is_counted_by_its_name(load: Any) -> None:
    (phase,) = load("--model", "faulty", "--concurrency", "1", "--requests", "24", "--output-tokens", "4")["phases"]
    assert (phase["sent"], phase["succeeded"], phase["failed"]) == (24, 4, 20)
    assert phase["errors"] == {
        "http_429": 4,
        "http_503": 4,
        "error_event:worker_lost": 4,
        "disconnected": 4,
        "malformed": 4,
    }
    assert phase["output_tokens"] == 16
    assert any("busy" in example for example in phase["error_examples"])
    assert any("(req-" in example for example in phase["error_examples"])


def test_a_stream_that_just_stops_is_no_success(load: Any) -> None:
    (phase,) = load("--model", "no end", "--requests", "2", status=1)["phases"]
    assert phase["errors"] == {"disconnected": 2}


def test_an_output_of_the_wrong_length_is_an_error(load: Any) -> None:
    (phase,) = load("--model", "short", "--requests", "2", "--output-tokens", "8", status=1)["phases"]
    assert phase["errors"] == {"wrong_length": 2}
    (phase,) = load("--model", "short", "--requests", "2", "--output-tokens", "8", "--no-ignore-eos")["phases"]
    assert (phase["succeeded"], phase["output_tokens"]) == (2, 8)


def test_a_request_without_end_times_out_and_frees_the_server(load: Any, server: ScriptedServer) -> None:
    arguments = ["--model", "stuck", "--requests", "3", "--concurrency", "3", "--timeout", "3"]
    (phase,) = load(*arguments, status=1)["phases"]
    assert phase["errors"] == {"timeout": 3}
    while server.seen.running:
        time.sleep(0.05)


def test_goodput_counts_what_keeps_the_slo(load: Any) -> None:
    """Every second request waits three seconds for its first token."""
    arguments = ["--model", "half slow", "--concurrency", "10", "--requests", "10", "--output-tokens", "4"]
    (phase,) = load(*arguments, "--slo-ttft-ms", "2500")["phases"]
    assert (phase["goodput"]["requests"], phase["goodput"]["fraction"]) == (5, 0.5)
    (phase,) = load(*arguments, "--slo-ttft-ms", "60000", "--slo-tpot-ms", "0.001")["phases"]
    assert phase["goodput"]["requests"] == 0


def test_an_open_loop_does_not_wait_for_the_server_and_counts_its_queue(load: Any) -> None:
    """A server of ten requests a second gets forty: in the open loop the queue must show, whoever holds it."""
    common = ["--model", "serial", "--requests", "20", "--output-tokens", "2"]
    (closed,) = load(*common, "--concurrency", "1")["phases"]
    (opened,) = load(*common, "--rate", "40", "--arrivals", "constant")["phases"]
    (held,) = load(*common, "--rate", "40", "--arrivals", "constant", "--max-in-flight", "1")["phases"]
    assert opened["sent"] == held["sent"] == 20
    assert opened["ttft_ms"]["max"] > 5 * closed["ttft_ms"]["p50"]
    assert held["ttft_ms"]["max"] > 5 * closed["ttft_ms"]["p50"]
    assert held["send_delay_ms"]["max"] > 5 * closed["ttft_ms"]["p50"] > opened["send_delay_ms"]["p50"]


def test_tokens_are_counted_from_chunks_where_the_server_does_not_count(load: Any) -> None:
    (phase,) = load("--model", "uncounted", "--requests", "3", "--output-tokens", "5")["phases"]
    assert (phase["succeeded"], phase["output_tokens"], phase["tokens_counted_by"]) == (3, 15, "chunks")


def test_the_completions_endpoint_works_too(load: Any, server: ScriptedServer) -> None:
    (phase,) = load("--api", "completion", "--requests", "3", "--output-tokens", "5")["phases"]
    assert (phase["succeeded"], phase["itl_ms"]["n"]) == (3, 12)
    assert all("prompt" in body and body["ignore_eos"] for body in server.seen.bodies)


def test_a_trace_is_replayed_with_its_scaling_in_the_report(load: Any, server: ScriptedServer, tmp_path: Path) -> None:
    trace = tmp_path / "small.jsonl"
    rows = [{"timestamp": 500 * n, "input_length": 400 + n, "output_length": 80, "hash_ids": [1, n]} for n in range(6)]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    scaling = ["--length-scale", "0.1", "--time-scale", "0.2", "--max-output-tokens", "6"]
    report = load("--trace", str(trace), *scaling)
    (phase,) = report["phases"]
    assert (phase["sent"], phase["succeeded"], phase["output_tokens"]) == (6, 6, 36)
    assert phase["load"]["scale"] == {"length": 0.1, "time": 0.2, "max_prompt_tokens": 4096, "max_output_tokens": 6}
    assert phase["load"]["clipped_requests"] == 6
    assert report["configuration"]["trace"] == "small.jsonl"
    replayed = server.seen.at_s[2:]
    assert replayed[-1] - replayed[0] >= 0.4


def test_bench_runs_its_four_phases(load: Any) -> None:
    report = load("bench", "--phase-s", "1", "--output-tokens", "10", "--seed", "3")
    names = [phase["name"] for phase in report["phases"]]
    assert names[:3] == ["closed 1", "closed 4", "closed 8"]
    assert names[3].startswith("poisson")
    assert all(phase["succeeded"] == phase["sent"] > 0 for phase in report["phases"])
    one, four, eight, opened = (phase["requests_per_s"] for phase in report["phases"])
    assert one < max(four, eight)
    assert opened < max(four, eight)
    assert all("goodput" in phase for phase in report["phases"])


def test_mix_shows_what_long_prompts_cost_the_short_chats(load: Any) -> None:
    arguments = ["--alone-s", "1", "--long-every-s", "0.4", "--long-requests", "3", "--long-prompt-tokens", "400"]
    alone, beside, long = load("mix", *arguments)["phases"]
    assert [alone["name"], beside["name"], long["name"]] == ["short alone", "short beside long", "long prompts"]
    assert (long["sent"], long["succeeded"], long["input_tokens"]) == (3, 3, 1200)
    assert beside["itl_ms"]["p99"] > alone["itl_ms"]["p50"]
    assert beside["itl_ms"]["max"] >= 50


def test_overload_finds_the_capacity_and_counts_what_is_refused_at_ten_times_that(load: Any) -> None:
    arguments = ["--model", "crowded", "--concurrency", "4", "--capacity-s", "1.5", "--phase-s", "1.5"]
    found, calm, full, flood = load("overload", *arguments)["phases"]
    assert found["succeeded"] == found["sent"] > 0
    assert calm["load"]["rate_per_s"] == pytest.approx(0.8 * found["requests_per_s"], rel=0.01)
    assert full["load"]["rate_per_s"] == pytest.approx(found["requests_per_s"], rel=0.01)
    assert flood["load"]["rate_per_s"] == pytest.approx(10 * found["requests_per_s"], rel=0.01)
    assert flood["refused"] == flood["errors"]["http_503"] == flood["refusal_ms"]["n"] > flood["succeeded"] > 0
    assert flood["succeeded"] + flood["refused"] == flood["sent"]


def test_a_refusal_that_does_not_say_when_to_come_again_is_an_error_only(load: Any) -> None:
    (phase,) = load("run", "--model", "faulty", "--requests", "12", "--concurrency", "1")["phases"]
    assert phase["errors"]["http_503"] == phase["errors"]["http_429"] == 2
    assert phase["refused"] == phase["refusal_ms"]["n"] == 0


def test_the_report_holds_what_is_needed_to_repeat_it_and_no_secret(
    load: Any, monkeypatch: pytest.MonkeyPatch, server: ScriptedServer
) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "SECRET-KEY")
    report = load("--requests", "2", "--rate", "50")
    configuration, machine = report["configuration"], report["machine"]
    assert {
        "command": "run",
        "rate": 50.0,
        "requests": 2,
        "process": "poisson",
        "model": "steady",
    }.items() <= configuration.items()
    assert isinstance(configuration["seed"], int)
    assert configuration["prompt_token_cost"] == {"fixed": TEMPLATE_TOKENS, "per_word": 1.0}
    assert machine["cores"] == len(os.sched_getaffinity(0))
    text = json.dumps(report)
    assert "SECRET-KEY" not in text
    assert socket.gethostname() not in text
    assert str(Path.home()) not in text


def test_a_server_that_is_not_there_is_one_line_and_status_2() -> None:
    command = [sys.executable, "-m", "loadgen", "bench", "--url", "http://127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "127.0.0.1:1" in done.stderr
