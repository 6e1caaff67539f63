"""The KV store's start: what cannot work is refused in one line that says what to change."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from tests.conftest import free_port


def start(**environment: str) -> subprocess.CompletedProcess[str]:
    """One that is expected to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "services.kvstore"],
        env={**os.environ, "HEADRACE_TRANSPORT": "tcp", "HEADRACE_SECRET": "s", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def the_one_line(run: subprocess.CompletedProcess[str]) -> str:
    assert run.returncode == 1
    lines = [line for line in run.stderr.splitlines() if line.startswith("headrace kvstore:")]
    assert len(lines) == 1
    assert "Traceback" not in run.stderr
    return lines[0]


def test_listening_beyond_loopback_needs_a_secret() -> None:
    assert "HEADRACE_SECRET" in the_one_line(start(HEADRACE_HOST="0.0.0.0", HEADRACE_SECRET=""))


def test_more_memory_than_there_is_is_refused() -> None:
    assert "HEADRACE_STORE_MEMORY_GIB" in the_one_line(start(HEADRACE_STORE_MEMORY_GIB="1000000"))


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        assert str(port) in the_one_line(start(HEADRACE_STORE_PORT=str(port), HEADRACE_STORE_MEMORY_GIB="0.01"))


@pytest.mark.timeout(120)
def test_a_missing_nats_server_is_named() -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    assert url in the_one_line(start(HEADRACE_NATS_URL=url, HEADRACE_STORE_MEMORY_GIB="0.01"))
