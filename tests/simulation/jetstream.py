"""JetStream as nats-server 2.11+ does it, as far as Headrace uses it: streams, pull consumers, acks, direct gets.

The behaviour is held against a real server in `test_simulation_server`.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tests.simulation.world import UNIX_EPOCH_S, World

Headers = dict[str, str]
Send = Callable[[str, bytes, Headers | None, str], bool]
"""Subject, data, headers, reply; False when nobody listens there."""

CREATED = "2027-01-15T08:00:00Z"
FORGETS_S = 1.5
"""What consumers noted in this time before a kill -9 may be lost. Stored messages never are."""


@dataclass(frozen=True)
class Stored:
    seq: int
    subject: str
    data: bytes
    headers: Headers
    at: float


@dataclass
class Pull:
    reply: str
    batch: int
    expired: bool = False


@dataclass
class Removal:
    """A work message that was acked or purged, kept to come back after a kill -9."""

    at: float
    message: Stored


@dataclass
class Pending:
    dseq: int
    at: float
    """When the ack wait began."""
    first_at: float


class Refusal(Exception):
    """An error that JetStream answers with."""

    def __init__(self, err_code: int, description: str, code: int = 400) -> None:
        super().__init__(description)
        self.answer = {"error": {"code": code, "err_code": err_code, "description": description}}


class Stream:
    """One stream with its messages and consumers."""

    def __init__(
        self, world: World, send: Send, config: dict[str, Any], on_removed: Callable[[str, Stored], None]
    ) -> None:
        self._world = world
        self._send = send
        self._on_removed = on_removed
        self.config = config
        self.name: str = config["name"]
        self.messages: dict[int, Stored] = {}
        self.by_subject: dict[str, list[int]] = {}
        self.consumers: dict[str, Consumer] = {}
        self.last_seq = 0
        self.removed: deque[Removal] = deque()
        self.work_queue: bool = config.get("retention") == "workqueue"

    def takes(self, subject: str) -> bool:
        return any(matches(pattern, subject) for pattern in self.config["subjects"])

    def store(self, subject: str, data: bytes, headers: Headers | None) -> Stored:
        """Raises Refusal."""
        headers = headers or {}
        seqs = self.by_subject.get(subject)
        if (stream := headers.get("Nats-Expected-Stream")) is not None and stream != self.name:
            raise Refusal(10060, "expected stream does not match")
        previous = seqs[-1] if seqs else 0
        expected = headers.get("Nats-Expected-Last-Subject-Sequence")
        if expected is not None and int(expected) != previous:
            raise Refusal(10071, f"wrong last sequence: {previous}")
        config = self.config
        if config.get("discard") == "new":
            if 0 < config.get("max_msgs", -1) <= len(self.messages):
                raise Refusal(10077, "maximum messages exceeded", 503)
            if (
                config.get("discard_new_per_subject")
                and seqs
                and 0 < config.get("max_msgs_per_subject", -1) <= len(seqs)
            ):
                raise Refusal(10077, "maximum messages per subject exceeded", 503)
        self.last_seq += 1
        message = Stored(self.last_seq, subject, data, headers, self._world.now)
        self.messages[message.seq] = message
        if seqs is None:
            self.by_subject[subject] = [message.seq]
        else:
            seqs.append(message.seq)
        if (republish := config.get("republish")) is not None:
            target = republish["dest"].removesuffix(">") + subject[len(republish["src"].removesuffix(">")) :]
            self._send(target, data, self._described(message, {"Nats-Last-Sequence": str(previous)}), "")
        for consumer in self.consumers.values():
            if matches(consumer.filter, subject):
                consumer.new.append(message.seq)
                consumer.serve()
        return message

    def _described(self, message: Stored, more: Headers) -> Headers:
        return {
            **message.headers,
            "Nats-Stream": self.name,
            "Nats-Subject": message.subject,
            "Nats-Sequence": str(message.seq),
            "Nats-Time-Stamp": CREATED,
            **more,
        }

    def remove(self, seq: int) -> Stored | None:
        message = self.messages.pop(seq, None)
        if message is None:
            return None
        seqs = self.by_subject[message.subject]
        seqs.remove(seq)
        if not seqs:
            del self.by_subject[message.subject]
        self.removed.append(Removal(self._world.now, message))
        while self.removed and self.removed[0].at < self._world.now - FORGETS_S:
            self.removed.popleft()
        self._on_removed(self.name, message)
        return message

    def get_last(self, subject: str) -> tuple[bytes, Headers]:
        seqs = self.by_subject.get(subject)
        if not seqs:
            return b"", {"Status": "404", "Description": "Message Not Found"}
        message = self.messages[seqs[-1]]
        return message.data, self._described(message, {})

    def get_batch(self, subject: str, first_seq: int, batch: int) -> list[tuple[bytes, Headers]]:
        """Messages of one subject from a sequence on, and the closing status (ADR-31)."""
        seqs = self.by_subject.get(subject, [])
        start = bisect.bisect_left(seqs, first_seq)
        found = seqs[start : start + batch]
        if not found:
            return [(b"", {"Status": "404", "Description": "Message Not Found"})]
        answers: list[tuple[bytes, Headers]] = []
        left = len(seqs) - start
        before = 0
        for seq in found:
            left -= 1
            message = self.messages[seq]
            more = {"Nats-Num-Pending": str(left), "Nats-Last-Sequence": str(before)}
            answers.append((message.data, self._described(message, more)))
            before = seq
        closing = {"Nats-Num-Pending": str(left), "Nats-Last-Sequence": str(before)}
        answers.append((b"", {"Status": "204", "Description": "EOB", **closing}))
        return answers

    def info(self, subjects_filter: str | None, offset: int = 0) -> dict[str, Any]:
        state: dict[str, Any] = {
            "messages": len(self.messages),
            "bytes": sum(len(message.data) for message in self.messages.values()),
            "first_seq": min(self.messages, default=self.last_seq + 1),
            "last_seq": self.last_seq,
            "consumer_count": len(self.consumers),
            "num_subjects": len(self.by_subject),
        }
        answer: dict[str, Any] = {"config": self.config, "created": CREATED, "state": state}
        if subjects_filter is not None:
            found = {s: len(seqs) for s, seqs in self.by_subject.items() if matches(subjects_filter, s)}
            state["subjects"] = dict(list(found.items())[offset:])
            answer |= {"total": len(found), "offset": offset, "limit": 100_000}
        return answer

    def purge(self, subject_filter: str | None) -> int:
        found = [
            seq
            for seq, message in self.messages.items()
            if subject_filter is None or matches(subject_filter, message.subject)
        ]
        for seq in found:
            self.remove(seq)
        return len(found)

    def forget(self) -> None:
        """Kill -9: some of the latest acks, deliveries and counts were not on the disk."""
        draw = self._world.random
        since = self._world.now - draw.uniform(0, FORGETS_S)
        back = [r.message for r in self.removed if r.at > since and self.work_queue and draw.random() < 0.7]
        self.removed.clear()
        for message in back:
            if message.subject not in self.by_subject:
                self.messages[message.seq] = message
                self.by_subject[message.subject] = [message.seq]
        self.messages = dict(sorted(self.messages.items()))
        for consumer in self.consumers.values():
            consumer.forget(since, {message.seq for message in back})


class Consumer:
    """A durable pull consumer with explicit acks and no limit of deliveries."""

    def __init__(self, world: World, stream: Stream, send: Send, name: str, config: dict[str, Any]) -> None:
        self._world = world
        self._stream = stream
        self._send = send
        self.name = name
        self.config = config
        self.filter: str = config.get("filter_subject") or ">"
        self.new: deque[int] = deque(s for s, m in stream.messages.items() if matches(self.filter, m.subject))
        self.again: deque[int] = deque()
        self.pending: dict[int, Pending] = {}
        self.counts: dict[int, int] = {}
        self.waiting: deque[Pull] = deque()
        self.dseq = 0
        self._timer = 0

    @property
    def ack_wait_s(self) -> float:
        return float(self.config.get("ack_wait") or 30_000_000_000) / 1e9

    def pull(self, reply: str, request: dict[str, Any]) -> None:
        pull = Pull(reply, request.get("batch") or 1)
        if request.get("no_wait"):
            while pull.batch and (seq := self._next()) is not None:
                if not self._deliver(seq, pull):
                    self._put_back(seq)
                    return
            if pull.batch:
                self._send(reply, b"", {"Status": "404", "Description": "No Messages"}, "")
            return
        if len(self.waiting) >= (self.config.get("max_waiting") or 512):
            self._send(reply, b"", {"Status": "409", "Description": "Exceeded MaxWaiting"}, "")
            return
        self.waiting.append(pull)
        if request.get("expires"):
            self._world.after(request["expires"] / 1e9, self._expire, pull)
        self.serve()

    def _expire(self, pull: Pull) -> None:
        if pull in self.waiting:
            self.waiting.remove(pull)
            self._send(pull.reply, b"", {"Status": "408", "Description": "Request Timeout"}, "")

    def serve(self) -> None:
        """Deliver to those who wait, oldest first."""
        while self.waiting and (seq := self._next()) is not None:
            pull = self.waiting[0]
            if not self._deliver(seq, pull):
                self.waiting.popleft()  # nobody listens there any more
                self._put_back(seq)
            elif pull.batch == 0:
                self.waiting.popleft()

    def _put_back(self, seq: int) -> None:
        (self.again if seq in self.pending else self.new).appendleft(seq)

    def _next(self) -> int | None:
        while self.again:
            seq = self.again.popleft()
            if seq in self.pending:
                if seq in self._stream.messages:
                    return seq
                del self.pending[seq]
        if len(self.pending) >= (self.config.get("max_ack_pending") or 1000):
            return None
        while self.new:
            seq = self.new.popleft()
            if seq in self._stream.messages:
                return seq
        return None

    def _deliver(self, seq: int, pull: Pull) -> bool:
        message = self._stream.messages[seq]
        known = self.pending.get(seq)
        count = self.counts.get(seq, 0) + 1
        self.dseq += 1
        at_ns = int((UNIX_EPOCH_S + message.at) * 1e9)
        reply = f"$JS.ACK.{self._stream.name}.{self.name}.{count}.{seq}.{self.dseq}.{at_ns}.{len(self.new)}"
        if not self._send(pull.reply, message.data, message.headers or None, reply):
            self.dseq -= 1
            return False
        pull.batch -= 1
        self.counts[seq] = count
        if count > 1:
            self._world.count("redelivery")
        now = self._world.now
        self.pending[seq] = Pending(self.dseq, now, known.first_at if known else now)
        self._look_in(self.ack_wait_s)
        return True

    def _look_in(self, delay_s: float) -> None:
        self._timer += 1
        self._world.after(max(delay_s, 0.001), self._redeliver, self._timer)

    def _redeliver(self, timer: int) -> None:
        if timer != self._timer or not self.pending:
            return
        now, wait_s = self._world.now, self.ack_wait_s
        for seq, pending in list(self.pending.items()):
            if pending.at + wait_s <= now + 1e-9 and seq not in self.again:
                self.again.append(seq)
        left = [p.at + wait_s - now for seq, p in self.pending.items() if seq not in self.again]
        if left:
            self._look_in(min(left))
        self.serve()

    def answer(self, seq: int, what: bytes) -> None:
        """An ack of any kind. It names a message, not a delivery: whoever sends it, it counts."""
        if what in (b"", b"+ACK") or what.startswith(b"+TERM"):
            self.pending.pop(seq, None)
            self.counts.pop(seq, None)
            if seq <= self._stream.last_seq and self._stream.work_queue:
                self._stream.remove(seq)
            return
        pending = self.pending.get(seq)
        if pending is None:
            return
        if what.startswith(b"+WPI"):
            pending.at = self._world.now
        elif what.startswith(b"-NAK"):
            delay_ns = msgspec.json.decode(what[4:]).get("delay", 0) if len(what) > 4 else 0
            if delay_ns:
                pending.at = self._world.now - self.ack_wait_s + delay_ns / 1e9
                self._look_in(min(delay_ns / 1e9, self._soonest()))
            elif seq not in self.again:
                self.again.append(seq)
                self.serve()

    def _soonest(self) -> float:
        return min(p.at + self.ack_wait_s - self._world.now for p in self.pending.values())

    def info(self) -> dict[str, Any]:
        return {
            "stream_name": self._stream.name,
            "name": self.name,
            "created": CREATED,
            "config": self.config,
            "num_ack_pending": len(self.pending),
            "num_pending": sum(1 for seq in self.new if seq in self._stream.messages),
            "num_waiting": len(self.waiting),
            "num_redelivered": sum(1 for count in self.counts.values() if count > 1),
        }

    def delete(self) -> None:
        while self.waiting:
            self._send(self.waiting.popleft().reply, b"", {"Status": "409", "Description": "Consumer Deleted"}, "")

    def forget(self, since: float, back: set[int]) -> None:
        """Restart with what was on the disk at `since`; `back` are messages whose acks were lost."""
        draw = self._world.random
        self.waiting.clear()
        mine = [s for s, m in self._stream.messages.items() if matches(self.filter, m.subject)]
        lost = {s for s, p in self.pending.items() if p.first_at > since} | {s for s in back if draw.random() < 0.7}
        waiting = set(self.new) | lost
        for seq in lost:
            self.pending.pop(seq, None)
            self.counts.pop(seq, None)
        for seq in back - lost:
            if seq in mine:
                self.pending[seq] = Pending(self.dseq, since, since)
        if draw.random() < 0.5:
            self.counts.clear()
        self.new = deque(seq for seq in mine if seq in waiting)
        self.again = deque(seq for seq in self.again if seq in self.pending)
        self._look_in(0.01)


@dataclass
class JetStream:
    """All streams of the server, and the JSON API over them."""

    world: World
    send: Send
    on_removed: Callable[[str, Stored], None] = lambda _stream, _message: None
    """Told of each message that leaves a stream."""
    streams: dict[str, Stream] = field(default_factory=dict)

    def stream_of(self, subject: str) -> Stream | None:
        return next((stream for stream in self.streams.values() if stream.takes(subject)), None)

    def create(self, config: dict[str, Any]) -> None:
        self.streams[config["name"]] = Stream(self.world, self.send, config, self.on_removed)

    def forget(self) -> None:
        for stream in self.streams.values():
            stream.forget()

    def call(self, subject: str, data: bytes, reply: str) -> bool:
        """Serve `$JS.API...`; False where nothing answers."""
        verbs = subject.split(".")[2:]
        match verbs:
            case ["DIRECT", "GET", name, *rest] if name in self.streams:
                stream = self.streams[name]
                if rest:
                    self.send(reply, *stream.get_last(".".join(rest)), "")
                else:
                    query = msgspec.json.decode(data)
                    for answer, headers in self._direct(stream, query):
                        self.send(reply, answer, headers, "")
                return True
            case ["CONSUMER", "MSG", "NEXT", name, consumer]:
                if name not in self.streams or consumer not in self.streams[name].consumers:
                    return False
                self.streams[name].consumers[consumer].pull(reply, msgspec.json.decode(data) if data else {})
                return True
            case ["DIRECT", *_]:
                return False
        try:
            result: dict[str, Any] = self._manage(verbs, msgspec.json.decode(data) if data else {})
        except Refusal as refusal:
            result = refusal.answer
        self.send(reply, msgspec.json.encode(result), None, "")
        return True

    @staticmethod
    def _direct(stream: Stream, query: dict[str, Any]) -> list[tuple[bytes, Headers]]:
        if "last_by_subj" in query:
            return [stream.get_last(query["last_by_subj"])]
        subject, seq = query.get("next_by_subj"), query.get("seq", 1)
        if subject is None:
            message = stream.messages.get(seq)
            subject = message.subject if message is not None else ""
        if "batch" in query:
            return stream.get_batch(subject, seq, query["batch"])
        return stream.get_batch(subject, seq, 1)[:1]

    def _manage(self, verbs: list[str], query: dict[str, Any]) -> dict[str, Any]:  # noqa: PLR0911, PLR0912 - a table
        match verbs:
            case ["STREAM", "INFO", name]:
                return self._stream(name).info(query.get("subjects_filter"), query.get("offset", 0))
            case ["STREAM", "CREATE", name]:
                if name not in self.streams:
                    self.create(query)
                return self.streams[name].info(None)
            case ["STREAM", "UPDATE", name]:
                self._stream(name).config = query
                return self._stream(name).info(None)
            case ["STREAM", "DELETE", name]:
                for consumer in self._stream(name).consumers.values():
                    consumer.delete()
                del self.streams[name]
                return {"success": True}
            case ["STREAM", "PURGE", name]:
                return {"success": True, "purged": self._stream(name).purge(query.get("filter"))}
            case ["STREAM", "MSG", "DELETE", name]:
                if self._stream(name).remove(query["seq"]) is None:
                    raise Refusal(10057, f"message [{query['seq']}] not found")
                return {"success": True}
            case ["CONSUMER", "INFO", name, consumer]:
                return self._consumer(name, consumer).info()
            case ["CONSUMER", "DURABLE", "CREATE", name, consumer] | ["CONSUMER", "CREATE", name, consumer, *_]:
                stream = self._stream(name)
                known = stream.consumers.get(consumer)
                if known is None:
                    known = Consumer(self.world, stream, self.send, consumer, query["config"])
                    stream.consumers[consumer] = known
                else:
                    known.config = query["config"]
                return known.info()
            case ["CONSUMER", "DELETE", name, consumer]:
                self._consumer(name, consumer).delete()
                del self.streams[name].consumers[consumer]
                return {"success": True}
        raise Refusal(10000, f"the simulated server does not know {verbs}", 500)

    def _stream(self, name: str) -> Stream:
        if name not in self.streams:
            raise Refusal(10059, "stream not found", 404)
        return self.streams[name]

    def _consumer(self, name: str, consumer: str) -> Consumer:
        stream = self._stream(name)
        if consumer not in stream.consumers:
            raise Refusal(10014, "consumer not found", 404)
        return stream.consumers[consumer]


def matches(pattern: str, subject: str) -> bool:
    """NATS wildcards: `*` is one token, `>` is the rest."""
    if pattern in (">", subject):
        return True
    if pattern.endswith(".>") and "*" not in pattern:
        return subject.startswith(pattern[:-1])
    asked, given = pattern.split("."), subject.split(".")
    for n, token in enumerate(asked):
        if token == ">":
            return len(given) > n
        if n >= len(given) or token not in ("*", given[n]):
            return False
    return len(asked) == len(given)
