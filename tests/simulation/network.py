"""A nats-server and the connections to it: what arrives, when, in which order, and what never does.

From a client to the server everything keeps its order, as on a TCP connection, but the server's parts (log, queues,
acks, reads) each work at a pace of their own. To a client the order within a subject is kept, no more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from tests.simulation.jetstream import Headers, JetStream, Refusal, Stored
from tests.simulation.world import World

if TYPE_CHECKING:
    from tests.simulation.client import SimClient

MAX_PAYLOAD = 1 << 20


@dataclass
class Weather:
    """How the network is at present. Probabilities are per message."""

    latency_s: float = 0.0002
    lose: float = 0.0
    repeat: float = 0.0
    slow: float = 0.0
    """Held up for up to `slow_s`, by the way or by the server."""
    slow_s: float = 0.5

    def clear(self) -> None:
        self.lose = self.repeat = self.slow = 0.0


@dataclass(frozen=True)
class Frame:
    """What a client writes to its connection: `SUB`, `UNSUB`, `PUB` or `PING`."""

    verb: str
    subject: str = ""
    sid: int = 0
    data: bytes = b""
    reply: str = ""
    headers: Headers | None = None
    queue: str = ""


@dataclass(frozen=True)
class Interest:
    link: Link
    sid: int
    queue: str


class Link:
    """One connection. When it breaks, what was on its way is lost."""

    def __init__(self, server: Server, client: SimClient) -> None:
        self.open = True
        self.client = client
        self.name = client.name
        self.subjects: dict[int, str] = {}
        self._server = server
        self._world = server.world
        self._up_to = 0.0
        """When the last frame on its way to the server arrives."""
        self._down_to: dict[str, float] = {}
        self.held_until = 0.0
        """A cut cable, or a switch that restarts: nothing arrives before, but nothing is lost."""

    def send(self, frame: Frame) -> None:
        """Client to server, in order."""
        if not self.open:
            return
        server, weather = self._server, self._server.weather
        arrival = self._world.now + self._delay()
        if frame.verb == "PUB":
            if weather.lose and server.loses(frame.subject):
                self._world.count("message lost")
                self._world.note(f"lost {self.name} -> {frame.subject}")
                return
            if weather.repeat and self._world.random.random() < weather.repeat:
                self._world.count("message repeated")
                server.repeated.add(frame.subject)
                self._world.note(f"repeated {self.name} -> {frame.subject}")
                self._world.at(arrival + self._delay() + 0.001, server.receive, self, frame)
        self._up_to = max(self._up_to + 1e-9, arrival)
        self._world.at(self._up_to, server.receive, self, frame)

    def deliver(self, sid: int, subject: str, data: bytes, headers: Headers | None, reply: str) -> None:
        """Server to client, in order within the subject."""
        server = self._server
        if server.weather.lose and server.loses(subject):
            self._world.count("message lost")
            self._world.note(f"lost {subject} -> {self.name}")
            return
        arrival = max(self._world.now + self._delay(), self._down_to.get(subject, 0.0) + 1e-9)
        self._down_to[subject] = arrival
        self._world.at(arrival, self._arrive, sid, subject, data, headers, reply)

    def _arrive(self, sid: int, subject: str, data: bytes, headers: Headers | None, reply: str) -> None:
        if self.open:
            self.client.arrived(sid, subject, data, headers, reply)

    def _delay(self) -> float:
        weather, draw = self._server.weather, self._world.random
        delay = weather.latency_s * (0.5 + draw.random())
        if weather.slow and draw.random() < weather.slow:
            delay += weather.slow_s * draw.random() ** 3
        return max(delay, self.held_until - self._world.now)

    def close(self) -> None:
        """The process has closed it, or has died: what it wrote before still arrives."""
        self._up_to = max(self._up_to + 1e-9, self._world.now + self._delay())
        self._world.at(self._up_to, self.cut)

    def cut(self) -> None:
        """Broken at both ends."""
        if self.open:
            self.open = False
            self._server.gone(self)
            self.client.disconnected(self)


class Server:
    """Routes messages by interest, and keeps the streams. `crash` is kill -9 and a restart."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.weather = Weather()
        self.jetstream = JetStream(world, self.publish)
        self.up = True
        self.links: list[Link] = []
        self.on_publish: list[Callable[[Link, Frame], bool]] = []
        """Told of each publication that arrives; True when it is to have no effect."""
        self.on_stored: list[Callable[[str, Stored], None]] = []
        self.repeated: set[str] = set()
        """Subjects of which a message came twice."""
        self._interest: dict[str, list[Interest]] = {}
        self._tails: set[str] = set()
        self._lanes: dict[tuple[int, str], float] = {}

    def connect(self, client: SimClient) -> Link:
        link = Link(self, client)
        self.links.append(link)
        return link

    def loses(self, subject: str) -> bool:
        """Whether this message is lost. An answer to a batched read is lost with all that follow it, or not at all."""
        return not subject.startswith("_INBOX.read") and self.world.random.random() < self.weather.lose

    def crash(self, down_s: float) -> None:
        if not self.up:
            return
        self.world.note(f"nats-server killed for {down_s:.2f} s")
        self.up = False
        for link in list(self.links):
            link.cut()
        self.world.after(down_s, self._restart)

    def _restart(self) -> None:
        self.world.note("nats-server is back")
        self.jetstream.forget()
        self.up = True

    def gone(self, link: Link) -> None:
        if link in self.links:
            self.links.remove(link)
        for sid in list(link.subjects):
            self._unsubscribe(link, sid)

    def receive(self, link: Link, frame: Frame) -> None:
        """A frame has arrived."""
        if not self.up or not link.open:
            return
        match frame.verb:
            case "SUB":
                if frame.sid in link.subjects:
                    return
                link.subjects[frame.sid] = frame.subject
                self._interest.setdefault(frame.subject, []).append(Interest(link, frame.sid, frame.queue))
                if frame.subject.endswith(".>"):
                    self._tails.add(frame.subject)
            case "UNSUB":
                self._unsubscribe(link, frame.sid)
            case "PING":
                self.world.after(0.0001, link.client.ponged)
            case "PUB":
                self._in_lane(link, frame)

    def _unsubscribe(self, link: Link, sid: int) -> None:
        subject = link.subjects.pop(sid, None)
        if subject is None:
            return
        left = [i for i in self._interest[subject] if i.link is not link or i.sid != sid]
        if left:
            self._interest[subject] = left
        else:
            del self._interest[subject]
            self._tails.discard(subject)

    def _in_lane(self, link: Link, frame: Frame) -> None:
        """Each part of the server takes a connection's messages in order, but not in step with the other parts."""
        now, weather = self.world.now, self.weather
        if frame.subject.startswith("$JS.API.CONSUMER.MSG"):
            lane = "pull"
        elif frame.subject.startswith("$JS.ACK"):
            lane = "ack"
        elif frame.subject.startswith("$JS"):
            lane = "api"
        else:
            lane = frame.subject[:7]
        key = (id(link), lane)
        due = max(now, self._lanes.get(key, 0.0))
        if weather.slow and self.world.random.random() < weather.slow:
            due += weather.slow_s * self.world.random.random() ** 3
        if due <= now:
            self._take(link, frame)
            return
        self._lanes[key] = due + 1e-9
        self.world.at(due, self._take, link, frame)

    def _take(self, link: Link, frame: Frame) -> None:
        if not self.up:
            return
        subject = frame.subject
        self.world.note(f"{link.name} -> {subject}")
        swallowed = [tell(link, frame) for tell in self.on_publish]
        if any(swallowed) or not self.up:
            return
        if subject.startswith("$JS.API."):
            if not self.jetstream.call(subject, frame.data, frame.reply) and frame.reply:
                self._no_responders(frame.reply)
            return
        if subject.startswith("$JS.ACK."):
            self._ack(subject, frame)
            return
        stream = self.jetstream.stream_of(subject)
        heard = self.publish(subject, frame.data, frame.headers, frame.reply)
        if stream is None:
            if not heard and frame.reply:
                self._no_responders(frame.reply)
            return
        try:
            stored = stream.store(subject, frame.data, frame.headers)
        except Refusal as refusal:
            self.world.count("append or job refused")
            self.world.note(f"refused {subject}: {refusal}")
            answer = refusal.answer | {"stream": stream.name, "seq": 0}
        else:
            self.world.note(f"stored {stream.name} {stored.seq} {subject}")
            for record in self.on_stored:
                record(stream.name, stored)
            answer = {"stream": stream.name, "seq": stored.seq}
        if frame.reply:
            self.publish(frame.reply, msgspec.json.encode(answer), None, "")

    def _ack(self, subject: str, frame: Frame) -> None:
        _, _, stream_name, consumer_name, _, seq, _, _, _ = subject.split(".")
        stream = self.jetstream.streams.get(stream_name)
        consumer = stream.consumers.get(consumer_name) if stream is not None else None
        if consumer is None:
            if frame.reply:
                self._no_responders(frame.reply)
            return
        consumer.answer(int(seq), frame.data)
        if frame.reply:
            self.publish(frame.reply, b"", None, "")

    def _no_responders(self, reply: str) -> None:
        self.publish(reply, b"", {"Status": "503"}, "")

    def publish(self, subject: str, data: bytes, headers: Headers | None, reply: str) -> bool:
        """To all who listen, and one of each queue group. False when nobody does."""
        found = list(self._interest.get(subject, ()))
        found += self._interest.get(subject.rpartition(".")[0] + ".*", ())
        for tail in self._tails:
            if subject.startswith(tail[:-1]):
                found += self._interest[tail]
        groups: dict[str, list[Interest]] = {}
        for interest in found:
            if interest.queue:
                groups.setdefault(interest.queue, []).append(interest)
            else:
                interest.link.deliver(interest.sid, subject, data, headers, reply)
        for members in groups.values():
            chosen = self.world.random.choice(members)
            chosen.link.deliver(chosen.sid, subject, data, headers, reply)
        return bool(found)
