"""The promises, checked at the server with each record that it stores and each work message that it lets go."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.bus import LogEntry, LogState
from shared.protocol.records import Accepted, Claimed, Ended, HandedBack, Tokens, decode_record
from shared.protocol.subjects import log_subject
from shared.worker.takeover import SUSPECT_AFTER
from tests.simulation.jetstream import Stored
from tests.simulation.plan import TENANT, Asked
from tests.simulation.world import World


@dataclass
class Log:
    state: LogState = field(default_factory=LogState)
    entries: list[LogEntry] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    handed_on: bool = False


class Audit:
    """Knows every request's right output and watches what is stored. Failures are told to the world."""

    def __init__(
        self, world: World, requests: dict[str, Asked], *, strict: bool, crashes: bool, repeated: set[str]
    ) -> None:
        """`requests`: by each id that a run of them may have. `strict`: no fault but its own death makes a worker
        forget what it has claimed. `crashes`: workers die, or look as if they had. `repeated`: subjects of which a
        message came twice: the refusal of the second may be the answer that a writer hears.
        """
        self._world = world
        self._strict = strict
        self._crashes = crashes
        self._repeated = repeated
        self.requests = requests
        self.logs: dict[str, Log] = {}

    def stored(self, stream: str, message: Stored) -> None:
        request_id = message.subject.rpartition(".")[2]
        if stream == "HR_LOG":
            self._record(request_id, message)
        elif stream == "HR_JOB":
            log = self.logs[request_id]
            log.handed_on = True
            if not log.state.output_ids:
                self._world.fail(f"{request_id} was handed to decode without its first token")

    def _record(self, request_id: str, message: Stored) -> None:
        record = decode_record(message.data)
        log = self.logs.setdefault(request_id, Log())
        state, fail = log.state, self._world.fail
        self._world.note(f"{request_id} #{message.seq} {message.data.decode()}")
        if state.ended is not None:
            fail(f"{request_id}: a record behind the terminal one: {record}")
            return
        if state.accepted is None and not isinstance(record, Accepted):
            fail(f"{request_id}: begins with {record}")
        match record:
            case Accepted():
                if state.accepted is not None:
                    fail(f"{request_id}: accepted twice")
            case Claimed():
                self._claim(request_id, state, record)
            case HandedBack(epoch=epoch):
                if epoch != state.epoch:
                    fail(f"{request_id}: hand-back of epoch {epoch} in epoch {state.epoch}")
            case Tokens(epoch=epoch, index=index, ids=ids):
                self._world.count("token record")
                right = self.requests[request_id].output[0]
                if epoch != state.epoch:
                    fail(f"{request_id}: tokens of epoch {epoch} in epoch {state.epoch}")
                if index != len(state.output_ids):
                    fail(f"{request_id}: tokens begin at {index}, {len(state.output_ids)} are there")
                    return
                if ids != right[index : index + len(ids)] or not ids:
                    fail(f"{request_id}: tokens {ids} at {index}, not {right[index : index + len(ids)]}")
                log.texts.append(record.text)
            case Ended():
                self._ending(request_id, state, record)
        entry = LogEntry(message.seq, record)
        state.apply(entry)
        log.entries.append(entry)

    def _claim(self, request_id: str, state: LogState, claim: Claimed) -> None:
        fail = self._world.fail
        if claim.epoch != state.epoch + 1:
            fail(f"{request_id}: claim with epoch {claim.epoch} behind epoch {state.epoch}")
        if state.holder is not None and state.holder.stage == claim.stage:
            self._world.count("takeover")
        crashed = [earlier for earlier in state.unproductive if earlier.stage == claim.stage]
        if crashed and not self._crashes:
            fail(f"{request_id}: nobody has crashed, but {crashed} count as crashes")
        suspect = len(crashed) >= SUSPECT_AFTER
        if claim.alone != suspect:
            fail(f"{request_id}: claimed with alone={claim.alone} behind {state.unproductive}")
        if claim.alone:
            self._world.count("claim alone")
        if not self._strict:
            return
        for other_id, log in self.logs.items():
            held = log.state.unproductive[-1] if log.state.unproductive else log.state.holder
            if other_id == request_id or held is None or held.worker != claim.worker or not self._still_holds(log):
                continue
            waits = held.alone and held in log.state.unproductive
            if claim.alone or waits:
                fail(
                    f"{claim.worker} claims {request_id} (alone={claim.alone}) and has {other_id} (alone={held.alone})"
                )

    @staticmethod
    def _still_holds(log: Log) -> bool:
        """Whether the last claim's worker has not let go of the request, as far as the log tells."""
        last = log.entries[-1].record
        handed_on = log.handed_on and log.state.holder is not None and log.state.holder.stage == "prefill"
        return not handed_on and not isinstance(last, (Ended, HandedBack))

    def _ending(self, request_id: str, state: LogState, ended: Ended) -> None:
        fail, right = self._world.fail, self.requests[request_id].output
        if ended.usage.completion_tokens != len(state.output_ids):
            written, told = len(state.output_ids), ended.usage.completion_tokens
            fail(f"{request_id}: ended with usage of {told} tokens, {written} were written")
        if ended.reason in ("stop", "length") and (state.output_ids, ended.reason) != right:
            fail(f"{request_id}: ended with {ended.reason} behind {state.output_ids}, right are {right}")
        if ended.error is not None and ended.error.code == "worker_crashed":
            self._world.count("conviction")
            alone = [claim for claim in state.unproductive if claim.alone]
            if len(alone) < 2:
                fail(f"{request_id}: convicted with {len(alone)} crashes while alone")

    def lost(self, request_id: str, epoch: int) -> None:
        """A worker says that the request is another's: then the last record is not its own."""
        self._world.count("request lost to another")
        log = self.logs.get(request_id)
        last = log.entries[-1].record if log is not None else None
        if log_subject(TENANT, request_id) in self._repeated:
            return
        if not isinstance(last, Claimed | Tokens | Ended) or last.epoch != epoch:
            return
        if not isinstance(last, Ended) or last.reason in ("stop", "length"):
            self._world.fail(f"{request_id}: given up by its holder, which wrote the last record: {last}")

    def removed(self, stream: str, message: Stored) -> None:
        """A work message was acked or purged: the request must not need it any more."""
        request_id = message.subject.rpartition(".")[2]
        if stream in ("HR_LOG", "HR_DEAD"):
            return
        self._world.note(f"{stream} lets go of {request_id}")
        log = self.logs.get(request_id)
        if log is None or log.state.ended is not None:
            return
        if stream != "HR_JOB" and log.handed_on:
            return
        self._world.fail(f"{request_id}: its message left {stream} unfinished, at {log.state}")

    def open_requests(self) -> list[str]:
        return [request_id for request_id, log in self.logs.items() if log.state.ended is None]

    def outcome(self, asked: Asked, ids: list[str], accepted: str | None, cancelled: bool) -> None:
        """At the end of the run: whether the request ended as it had to. `accepted` is the run that its client was told
        of last."""
        fail = self._world.fail
        runs = {request_id: self.logs[request_id].state for request_id in ids if request_id in self.logs}
        for request_id, state in runs.items():
            if state.ended is None:
                fail(f"{request_id} never ended; {state}")
        finished = [
            request_id
            for request_id, state in runs.items()
            if state.ended is not None and state.ended.reason in ("stop", "length")
        ]
        if len(finished) > 1:
            fail(f"{asked.key} was answered by {finished}")
        if accepted is None:
            return
        ended = runs[accepted].ended if accepted in runs else None
        if ended is None:
            fail(f"{accepted} was accepted and has no end")
            return
        code = ended.error.code if ended.error is not None else None
        if asked.poison is not None:
            if code != "worker_crashed":
                fail(f"{accepted} crashes its workers and ended with {ended}")
        elif asked.must_finish and not cancelled and ended.reason not in ("stop", "length"):
            fail(f"{accepted} had to finish and ended with {ended}")
