"""Makes the faults of a plan, at their time or as a message arrives, and heals everything in the end."""

from __future__ import annotations

from tests.simulation.network import Frame, Link, Server
from tests.simulation.plan import Fault
from tests.simulation.services import GatewayProgram, WorkerProgram
from tests.simulation.world import Process, World


class Faults:
    """`workers` and `gateways` are the programs by name, kept up to date by their owner."""

    def __init__(
        self,
        world: World,
        server: Server,
        workers: dict[str, WorkerProgram],
        gateways: dict[str, GatewayProgram],
    ) -> None:
        self.made: list[str] = []
        self._world = world
        self._server = server
        self._workers = workers
        self._gateways = gateways
        self._waiting: list[Fault] = []
        self._changes = 0
        self._healed = False
        server.on_publish.append(self._on_publish)

    @property
    def to_come(self) -> bool:
        """Whether some wait for messages that have not come yet."""
        return bool(self._waiting)

    def plan(self, faults: list[Fault], begin_s: float) -> None:
        for fault in faults:
            if fault.at is not None:
                self._world.at(begin_s + fault.at, self._make, fault, None)
            else:
                self._waiting.append(fault)

    def heal(self) -> None:
        """No fault any more: what is stopped goes on, what hangs is killed as an operator would, the sky clears."""
        self._world.note("healed")
        self._healed = True
        self._waiting.clear()
        self._server.weather.clear()
        for link in [link for link in self._server.links if link.held_until > self._world.now]:
            link.cut()
        for process in list(self._world.processes):
            process.resume()
        for program in list(self._workers.values()):
            if program.async_engine is not None and program.async_engine.hangs:
                program.process.kill()

    def _on_publish(self, link: Link, frame: Frame) -> bool:
        """Whether the message is swallowed, since its sender has died before it went out."""
        if not self._waiting or not _changes_something(frame):
            return False
        self._changes += 1
        for fault in [fault for fault in self._waiting if fault.at_event == self._changes]:
            self._waiting.remove(fault)
            process = link.client.process
            if fault.kind == "kill_before":
                self._make(fault, process)
                return True
            self._world.after(fault.delay_s, self._make, fault, process if fault.to_sender else None)
        return False

    def _make(self, fault: Fault, process: Process | None) -> None:
        if self._healed:
            return
        if process is None or process.dead:
            process = self._pick(fault)
        self.made.append(fault.kind)
        self._world.count(f"fault {fault.kind}")
        self._world.note(f"fault {fault} for {process.name if process else None}")
        match fault.kind:
            case "nats" | "outage":
                self._server.crash(fault.lasts_s)
            case "storm":
                self._storm(fault)
            case "consumer_deleted":
                self._delete_consumers(fault)
            case "kill" | "kill_before" if process is not None:
                process.kill()
            case "stop" if process is not None:
                self._stop(process, fault.lasts_s)
            case "cut" | "hold" if process is not None:
                self._disturb(process, fault)
            case _ if process is not None and process.name in self._workers:
                self._reach_into(self._workers[process.name], fault)

    def _pick(self, fault: Fault) -> Process | None:
        programs: list[WorkerProgram | GatewayProgram] = [*self._workers.values(), *self._gateways.values()]
        alive = [program.process for program in programs if not program.process.dead]
        return alive[int(fault.pick * len(alive))] if alive else None

    def _stop(self, process: Process, lasts_s: float) -> None:
        process.stop()
        self._world.after(lasts_s, process.resume)

    def _disturb(self, process: Process, fault: Fault) -> None:
        for link in [link for link in self._server.links if link.client.process is process]:
            if fault.kind == "cut":
                self._world.note(f"{process.name} loses its connection")
                link.cut()
            else:
                self._world.note(f"{process.name} is out of reach")
                link.held_until = self._world.now + fault.lasts_s

    def _reach_into(self, worker: WorkerProgram, fault: Fault) -> None:
        match fault.kind:
            case "drain":
                worker.drain()
            case "stop_drain":  # a stopped process gets its SIGTERM when it goes on
                self._stop(worker.process, fault.lasts_s)
                self._world.after(fault.lasts_s, worker.drain)
            case "hang":
                worker.hang()
            case "step_fails":
                worker.fail_step()

    def _storm(self, fault: Fault) -> None:
        weather = self._server.weather
        weather.lose = fault.severity / 3
        weather.repeat = fault.severity / 10
        weather.slow = fault.severity
        weather.slow_s = 0.2 + 3 * fault.pick
        self._world.after(fault.lasts_s, weather.clear)

    def _delete_consumers(self, fault: Fault) -> None:
        streams = [s for s in self._server.jetstream.streams.values() if s.consumers]
        if self._server.up and streams:
            stream = streams[int(fault.pick * len(streams))]
            for name in list(stream.consumers):
                stream.consumers.pop(name).delete()


def _changes_something(frame: Frame) -> bool:
    """Whether the message changes what is stored."""
    if frame.subject.startswith("hr."):
        return frame.subject.startswith(("hr.tok.", "hr.req.", "hr.job."))
    return frame.subject.startswith("$JS.ACK.") and not frame.data.startswith(b"+WPI")
