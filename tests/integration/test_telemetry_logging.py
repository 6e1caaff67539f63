"""Log lines of real processes: JSON with request and trace ids, one renderer for everybody, and never a prompt."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.conftest import free_port
from tests.integration.otlp_receiver import otlp_http_receiver

PROGRAM = Path(__file__).with_name("telemetry_program.py")


def lines_of(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def test_lines_are_json_with_request_and_trace_ids() -> None:
    with otlp_http_receiver() as receiver:
        environment = os.environ | receiver.environment
        output = subprocess.check_output([sys.executable, PROGRAM, "logs"], env=environment, text=True, timeout=60)
        (span,) = receiver.wait_for_names(["decode"])
    lines = {line["event"]: line for line in lines_of(output)}
    claimed = lines["claimed"]
    assert {
        "service": "decode",
        "instance": "decode-0",
        "request_id": "req-1",
        "level": "info",
    }.items() <= claimed.items()
    assert (claimed["trace_id"], claimed["span_id"]) == (span.trace_id, span.span_id)
    assert lines["slow consumer on hr.live.x"]["trace_id"] == span.trace_id
    assert lines["refused"]["level"] == "error"
    assert "telemetry_program.py" in lines["refused"]["exception"]
    assert "not_shown" not in lines


def test_a_prompt_never_reaches_the_log() -> None:
    output = subprocess.check_output([sys.executable, PROGRAM, "logs"], text=True, timeout=60)
    assert "claimed" in output
    # The source line of a traceback names the literal in the program itself; what was passed at run time is not there.
    assert not [line for line in lines_of(output) if "SECRET-PROMPT" in str(line | {"exception": ""})]
    exception = next(line["exception"] for line in lines_of(output) if "exception" in line)
    assert exception.startswith("JSONDecodeError (message withheld)")


def test_uvicorn_speaks_through_the_same_renderer() -> None:
    port = free_port()
    arguments = json.dumps({"port": port})
    with subprocess.Popen(
        [sys.executable, PROGRAM, "serve", arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for _ in range(200):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10).close()
            except urllib.error.HTTPError:
                break
            except OSError:
                time.sleep(0.1)
        output, errors = process.communicate(timeout=30)
    lines = lines_of(output)
    assert errors == ""
    assert {"uvicorn.error", "uvicorn.access"} <= {line["logger"] for line in lines}
    assert any("RuntimeError: broken handler" in line.get("exception", "") for line in lines)


def test_a_terminal_gets_readable_lines_and_a_pipe_gets_json() -> None:
    script = (
        "import structlog; from shared.telemetry import configure_logging;"
        "configure_logging('decode', 'decode-0'); structlog.get_logger('x').info('claimed', request_id='req-1')"
    )
    leader, follower = pty.openpty()
    try:
        subprocess.run([sys.executable, "-c", script], stdout=follower, check=True, timeout=60)
        on_terminal = os.read(leader, 65536).decode()
    finally:
        os.close(follower)
        os.close(leader)
    in_pipe = subprocess.check_output([sys.executable, "-c", script], text=True, timeout=60)
    assert "claimed" in on_terminal
    assert not on_terminal.lstrip().startswith("{")
    assert lines_of(in_pipe)[0]["request_id"] == "req-1"
