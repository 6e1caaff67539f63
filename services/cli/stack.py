"""The life of a stack: launched, scaled, restarted, taken down. Knows processes; readiness is judged in `readiness`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from services.cli.errors import StackNotRunning, StackRunning, StartFailed, SupervisorGone
from services.cli.home import Home
from services.cli.leftovers import end_processes, stack_processes
from services.cli.log_files import last_complaint
from services.cli.preflight import gateway_port, require_free
from services.cli.spec import StackSpec, select, spare_of
from services.cli.supervisor import Supervisor
from services.cli.supervisor_config import Binaries, render_config, service_environment
from services.cli.tcp import accepts
from shared.protocol.subjects import Stage

_SUPERVISOR_START_S = 15.0
_SERVER_START_S = 20.0
_SERVER_STOP_S = 15.0
_POLL_S = 0.05

Say = Callable[[str], None]


@dataclass(frozen=True)
class Stack:
    """A running stack: its state directory, its specification and its supervisor."""

    home: Home
    spec: StackSpec
    supervisor: Supervisor

    @classmethod
    def attach(cls, home: Home) -> Stack:
        """The stack that runs here. Raises StackNotRunning, which also says what a killed supervisor left behind."""
        spec = home.require_spec()
        supervisor = Supervisor(home.socket, spec.stop_wait_s)
        if supervisor.alive():
            return cls(home, spec, supervisor)
        if left := len(stack_processes(spec.stack_id)):
            raise StackNotRunning(
                f"the supervisor of this stack is gone, {left} of its processes still run; "
                "`headrace down` ends them, `headrace up` ends them and starts anew"
            )
        raise StackNotRunning(f"no stack is running here ({home.root}); start one with `headrace up`")

    @classmethod
    def of(cls, home: Home, spec: StackSpec) -> Stack:
        """Also when its supervisor was killed; `stop` then ends what is left. Raises StackNotRunning if nothing is."""
        stack = cls(home, spec, Supervisor(home.socket, spec.stop_wait_s))
        if not stack.supervisor.alive() and not stack_processes(spec.stack_id):
            raise StackNotRunning(f"no stack is running here ({home.root})")
        return stack

    def stop(self, say: Say) -> None:
        """Services first, together, each with time to hand its work back; then the servers; then the supervisor."""
        try:
            running = [name for name, info in self.supervisor.processes().items() if not info.down]
            say(f"stopping {len(running)} processes")
            self.supervisor.stop(name for name in running if name not in self.spec.servers)
            self.supervisor.stop(name for name in running if name in self.spec.servers)
            self.supervisor.shutdown()
        except SupervisorGone as error:
            say(f"{error}; ending its processes")
            end_processes(self.spec.stack_id)
        _wait_until(lambda: not stack_processes(self.spec.stack_id), _SERVER_STOP_S)
        self.kill()

    def kill(self) -> None:
        """End everything of this stack now."""
        end_processes(self.spec.stack_id, gently=False)
        self.home.drop_spec()

    def scale(self, stage: Stage, count: int) -> Stack:
        """Bring a stage to `count` instances, drained ones included; the others are not touched.

        Returns the stack as it is then. Raises PortInUse before anything has changed.
        """
        wanted = self.spec.scaled(stage, count)
        before, after = self.spec.instances(stage), wanted.instances(stage)
        removed = [name for name in before if name not in after]
        if stage == "gateway":
            require_free(gateway_port(wanted, number) for number in range(len(before), len(after)))
        scaled = self._become(wanted)
        for name in after:
            self.supervisor.add(name)
        if removed:
            self.supervisor.remove(removed)
        return scaled

    def add_spare(self, stage: Stage, number: int) -> Stack:
        """Start an instance that stands in for the one of this number. Does not wait until it is ready."""
        spared = self._become(self.spec.sparing(stage, number))
        spared.supervisor.add(spare_of(stage))
        return spared

    def remove_spare(self, stage: Stage) -> Stack:
        """Drain the spare of a stage, if there is one, and forget it."""
        if stage not in self.spec.spares:
            return self
        self.supervisor.remove([spare_of(stage)])
        return self._become(self.spec.without_spare(stage))

    def _become(self, wanted: StackSpec) -> Stack:
        """Write down what there shall be. The spec comes last: what it names, the supervisor knows."""
        self.home.write_config(render_config(wanted, self.home, Binaries.locate()))
        self.supervisor.reload_config()
        self.home.save_spec(wanted)
        return Stack(self.home, wanted, self.supervisor)

    def kill_instances(self, target: str) -> list[str]:
        """SIGKILL, as a crash would be; the supervisor starts them again. Returns those that were running."""
        return [name for name in select(self.spec, target) if self.supervisor.signal(name, "KILL")]


def launch(home: Home, spec: StackSpec, threads: int, say: Say) -> Stack:
    """Start the supervisor, then the servers, then every instance. Does not wait for the model.

    Raises StackRunning, StartFailed.
    """
    clear_stale(home, say)
    home.save_spec(spec)
    home.write_config(render_config(spec, home, Binaries.locate()))
    stack = Stack(home, spec, Supervisor(home.socket, spec.stop_wait_s))
    try:
        _start_supervisor(stack, threads)
        for server in spec.servers:
            stack.supervisor.start(server)
        _await_servers(stack)
        for name in spec.all_instances():
            stack.supervisor.start(name)
    except BaseException:
        stack.kill()
        raise
    return stack


def clear_stale(home: Home, say: Say) -> None:
    """Remove what an earlier stack left that is not running any more. Raises StackRunning when one is."""
    if Supervisor(home.socket).alive():
        raise StackRunning(
            f"a stack is running already ({home.root}); see `headrace status`, or end it with `headrace down`"
        )
    spec = home.load_spec()
    if spec is not None and (ended := end_processes(spec.stack_id)):
        say(f"ended {ended} processes that a killed supervisor had left behind")
    home.socket.unlink(missing_ok=True)
    home.pidfile.unlink(missing_ok=True)
    home.drop_spec()


def _start_supervisor(stack: Stack, threads: int) -> None:
    """In a session of its own: a Ctrl-C in this terminal must reach us first, so that we stop things in order."""
    environment = service_environment(stack.spec, stack.home.secret(), threads, os.environ)
    with stack.home.log_of("supervisor.out").open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 (fixed arguments)
            [sys.executable, "-m", "services.cli.supervisord", "--nodaemon", "-c", str(stack.home.config)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    _wait_until(lambda: process.poll() is not None or stack.supervisor.alive(), _SUPERVISOR_START_S)
    if process.poll() is not None or not stack.supervisor.alive():
        complaint = last_complaint(stack.home.log_of("supervisor.out"))
        raise StartFailed(f"the supervisor did not start: {complaint}")


def _await_servers(stack: Stack) -> None:
    ports = {"nats": stack.spec.nats_port, "valkey": stack.spec.redis_port}
    for server in stack.spec.servers:
        if not _wait_until(lambda name=server: accepts("127.0.0.1", ports[name]), _SERVER_START_S):  # type: ignore[misc]
            log = stack.home.log_of(server)
            raise StartFailed(f"{server} does not listen on port {ports[server]}: {last_complaint(log)} (see {log})")


def _wait_until(reached: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not reached():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
