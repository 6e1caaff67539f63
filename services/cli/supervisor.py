"""Talks to the supervisor (supervisord) over its unix socket: what runs, start, stop, add, remove, signal.

Which instances there should be is decided elsewhere; this module only carries it out.
"""

from __future__ import annotations

import http.client
import socket
import time
import xmlrpc.client
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import msgspec

from services.cli.errors import SupervisorGone
from services.cli.spec import STOP_WAIT_S

_CALL_TIMEOUT_S = 10.0
_POLL_S = 0.1
_KILL_S = 10.0
"""For the supervisor to kill what did not end by itself."""
_DOWN = frozenset({"STOPPED", "FATAL"})

# Fault codes of supervisor.xmlrpc.Faults that mean "it is so already".
_ALREADY_STARTED = 60
_NOT_RUNNING = 70
_ALREADY_ADDED = 90
_BAD_NAME = 10


class ProcessInfo(msgspec.Struct, frozen=True):
    """One supervised process. `state` is the supervisor's name for it; times are Unix seconds, 0 when it never ran."""

    name: str
    state: str
    pid: int
    start_unix_s: int
    stop_unix_s: int
    exit_status: int
    spawn_error: str

    @property
    def down(self) -> bool:
        """It stays down until somebody starts it; one that is EXITED or in BACKOFF is started again in a moment."""
        return self.state in _DOWN


class Supervisor:
    """Client of one running supervisor. Every call has a time-out and raises SupervisorGone when it fails.

    `stop_wait_s` is what its instances get to end by themselves (see `StackSpec`).
    """

    def __init__(self, socket_path: Path, stop_wait_s: int = STOP_WAIT_S) -> None:
        self._socket_path = socket_path
        self.stop_wait_s = stop_wait_s

    @property
    def stop_limit_s(self) -> float:
        """What was asked to stop is down within this time: ended, or killed by the supervisor."""
        return self.stop_wait_s + _KILL_S

    def alive(self) -> bool:
        """Whether somebody answers on the socket."""
        try:
            self._call("supervisor.getState")
        except SupervisorGone:
            return False
        return True

    def pid(self) -> int:
        return int(self._call("supervisor.getPID"))

    def processes(self) -> dict[str, ProcessInfo]:
        return {
            info["name"]: ProcessInfo(
                name=info["name"],
                state=info["statename"],
                pid=info["pid"],
                start_unix_s=info["start"],
                stop_unix_s=info["stop"],
                exit_status=info["exitstatus"],
                spawn_error=info["spawnerr"],
            )
            for info in self._call("supervisor.getAllProcessInfo")
        }

    def start(self, name: str) -> None:
        """Returns at once; the process is then STARTING."""
        self._call("supervisor.startProcess", name, False, accept=(_ALREADY_STARTED,))

    def stop(self, names: Iterable[str]) -> None:
        """Stop processes together and wait until all are down; the supervisor kills those that take too long."""
        waiting = set(names)
        deadline = time.monotonic() + self.stop_limit_s
        while not all(info.down for name, info in self.press_to_stop(waiting).items() if name in waiting):
            if time.monotonic() > deadline:
                raise SupervisorGone(f"{', '.join(sorted(waiting))} did not stop within {self.stop_limit_s:.0f} s")
            time.sleep(_POLL_S)

    def press_to_stop(self, names: Collection[str]) -> dict[str, ProcessInfo]:
        """Look at all processes, and send the stop signal to those among `names` that have not had it.

        Returns what it saw. To be repeated until they are down: for one that has just ended by itself the supervisor
        takes no signal, and starts it again.
        """
        processes = self.processes()
        for name in names:
            if name in processes and not processes[name].down and processes[name].state != "STOPPING":
                self._call("supervisor.stopProcess", name, False, accept=(_NOT_RUNNING, _BAD_NAME))
        return processes

    def signal(self, name: str, signal_name: str) -> bool:
        """False when the process does not run at the moment."""
        return self._call("supervisor.signalProcess", name, signal_name, accept=(_NOT_RUNNING,)) is not None

    def reload_config(self) -> None:
        """Read the configuration file again; running processes are not touched."""
        self._call("supervisor.reloadConfig")

    def add(self, name: str) -> None:
        """Begin to supervise a program of the configuration that was reloaded, and start it."""
        self._call("supervisor.addProcessGroup", name, accept=(_ALREADY_ADDED,))
        self.start(name)

    def remove(self, names: Iterable[str]) -> None:
        """Stop programs and forget them."""
        names = list(names)
        self.stop(names)
        for name in names:
            self._call("supervisor.removeProcessGroup", name, accept=(_BAD_NAME,))

    def shutdown(self) -> None:
        self._call("supervisor.shutdown")

    def _call(self, method: str, *arguments: object, accept: tuple[int, ...] = ()) -> Any:
        """One call on a connection of its own. Faults listed in `accept` mean that nothing had to be done."""
        transport = _UnixTransport(self._socket_path)
        try:
            with xmlrpc.client.ServerProxy("http://localhost", transport=transport) as proxy:
                return getattr(proxy, method)(*arguments)
        except xmlrpc.client.Fault as fault:
            if fault.faultCode in accept:
                return None
            raise SupervisorGone(f"the supervisor refused {method}{arguments}: {fault.faultString}") from fault
        except (OSError, http.client.HTTPException, xmlrpc.client.Error) as error:
            raise SupervisorGone(f"the supervisor does not answer at {self._socket_path}: {error}") from error


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=_CALL_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_CALL_TIMEOUT_S)
        self.sock.connect(str(self._path))


class _UnixTransport(xmlrpc.client.Transport):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def make_connection(self, host: Any) -> http.client.HTTPConnection:
        return _UnixConnection(self._path)
