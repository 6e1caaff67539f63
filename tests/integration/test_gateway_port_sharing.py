"""One port for two gateways of a stack: who may join, and that no connection is lost when the older one stops."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import free_port

GATEWAY = """
import select, signal, sys
from services.gateway.port_sharing import prefer_newest
from services.gateway.server import PortTaken, bind

stopping = []
signal.signal(signal.SIGTERM, lambda *_: stopping.append(1))
try:
    listener = bind("127.0.0.1", int(sys.argv[1]))
except PortTaken as error:
    print(error, flush=True)
    sys.exit(1)
listener.listen(128)
prefer_newest(listener)
listener.setblocking(False)
print("listens", flush=True)
while not stopping:
    if select.select([listener], [], [], 0.02)[0]:
        connection, _ = listener.accept()
        connection.sendall(sys.argv[2].encode())
        connection.close()
"""
"""Answers with its name, through the gateway's own sockets."""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def start(port: int) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def gateway(name: str, stack_id: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", GATEWAY, str(port), name],
            env={**os.environ, "HEADRACE_STACK_ID": stack_id},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield gateway
    for process in started:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def ask(port: int) -> str:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        return connection.recv(64).decode()


def test_the_newer_gateway_gets_all_connections_and_the_older_one_stops_without_losing_any(
    port: int, start: Start
) -> None:
    names = ["first", "second", "third", "fourth"]
    older = start(names[0], "stack")
    assert said(older) == "listens"
    assert ask(port) == names[0]
    for name in names[1:]:
        newer = start(name, "stack")
        assert said(newer) == "listens"
        assert {ask(port) for _ in range(50)} == {name}
        older.terminate()
        while older.poll() is None:
            assert ask(port) == name
        assert {ask(port) for _ in range(50)} == {name}
        older = newer


@pytest.mark.parametrize("stack_id", ["other", ""])
def test_a_gateway_of_another_stack_or_of_none_finds_the_port_taken(port: int, start: Start, stack_id: str) -> None:
    assert said(start("first", "stack")) == "listens"
    second = start("second", stack_id)
    assert f"cannot listen on 127.0.0.1:{port}" in said(second)
    assert second.wait(timeout=30) == 1


def test_a_foreign_process_that_would_share_its_port_is_not_joined(port: int, start: Start) -> None:
    with socket.socket() as foreign:
        foreign.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        foreign.bind(("127.0.0.1", port))
        foreign.listen()
        assert f"cannot listen on 127.0.0.1:{port}" in said(start("gateway", "stack"))


def test_two_gateways_that_belong_to_no_stack_do_not_share(port: int, start: Start) -> None:
    assert said(start("first", "")) == "listens"
    assert f"cannot listen on 127.0.0.1:{port}" in said(start("second", ""))
