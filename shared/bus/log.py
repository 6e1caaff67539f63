"""A request's log: compare-and-set appends, reads of history, and the state that a log amounts to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.errors import APIError

from shared.bus.errors import AppendRefused, PublishFailed, RequestUnknown
from shared.protocol.records import Accepted, Claimed, Ended, HandedBack, Record, Tokens, decode_record, encode_record
from shared.protocol.streams import LOG
from shared.protocol.subjects import log_subject

WRONG_LAST_SEQUENCE = 10071
"""JetStream's error code for a failed expected-last-sequence check."""

REQUEST_TIMEOUT_S = 2.0
READ_BATCH = 512

_HEADER_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_HEADER_STREAM = "Nats-Expected-Stream"
_GONE = (nats.errors.Error, APIError, asyncio.TimeoutError, ConnectionError)


@dataclass(frozen=True)
class LogEntry:
    """One stored record and its sequence number in the stream."""

    seq: int
    record: Record


@dataclass
class LogState:
    """What a log amounts to: who holds the request, what was emitted, how it ended. Pure; fed entry by entry."""

    accepted: Accepted | None = None
    epoch: int = 0
    claims: list[Claimed] = field(default_factory=list)
    unproductive: list[Claimed] = field(default_factory=list)
    """Claims since the last token whose holders did not hand back: they crashed, or one of them works now."""
    output_ids: list[int] = field(default_factory=list)
    text_chars: int = 0
    ended: Ended | None = None
    last_seq: int = 0

    @classmethod
    def replay(cls, entries: Iterable[LogEntry]) -> LogState:
        state = cls()
        for entry in entries:
            state.apply(entry)
        return state

    def apply(self, entry: LogEntry) -> None:
        """Take one more entry. Raises ValueError when token indexes do not continue: the log would be corrupt."""
        match entry.record:
            case Accepted() as accepted:
                self.accepted = accepted
            case Claimed() as claim:
                self.epoch = claim.epoch
                self.claims.append(claim)
                self.unproductive.append(claim)
            case HandedBack() as back:
                self.unproductive = [claim for claim in self.unproductive if claim.epoch != back.epoch]
            case Tokens() as tokens:
                if tokens.index != len(self.output_ids):
                    raise ValueError(
                        f"log entry {entry.seq} starts at token {tokens.index}, expected {len(self.output_ids)}"
                    )
                self.output_ids.extend(tokens.ids)
                self.unproductive.clear()
                self.text_chars += len(tokens.text)
            case Ended() as ended:
                self.ended = ended
        self.last_seq = entry.seq

    @property
    def holder(self) -> Claimed | None:
        """The last claim, whoever made it; its worker may be dead."""
        return self.claims[-1] if self.claims else None


class RequestLog:
    """Reads and appends one request's log. One append at a time; the owner serialises its own calls.

    `last_seq` is the sequence of the subject's last record as far as this writer knows: the next append is stored only
    if it is still the last.
    """

    def __init__(self, client: Client, tenant: str, request_id: str, last_seq: int = 0) -> None:
        self._client = client
        self.tenant = tenant
        self.request_id = request_id
        self.subject = log_subject(tenant, request_id)
        self.last_seq = last_seq
        self.wrote_tokens = False
        """Whether this writer has stored a token: it has made progress."""

    async def append(self, record: Record, *, patience_s: float = 60.0, headers: dict[str, str] | None = None) -> int:
        """Store `record` behind `last_seq` and return its sequence.

        Waits out a NATS restart for `patience_s`. After an append whose answer was lost it reads the last record, which
        may be its own. Raises AppendRefused when another writer was first, PublishFailed when patience ran out.
        """
        await self._store(encode_record(record), patience_s, headers)
        self.wrote_tokens = self.wrote_tokens or isinstance(record, Tokens)
        return self.last_seq

    async def _store(self, data: bytes, patience_s: float, headers: dict[str, str] | None) -> None:
        give_up = time.monotonic() + patience_s
        first_try = True
        while True:
            try:
                self.last_seq = await self._publish(data, headers)
                return
            except AppendRefused:
                # A try whose answer was lost may be what refuses this one.
                if first_try or not await self._is_last(data, give_up):
                    raise
                return
            except _GONE as error:
                first_try = False
                if time.monotonic() >= give_up:
                    raise PublishFailed(f"{self.request_id}: log not reachable for {patience_s:.0f} s") from error
                await asyncio.sleep(0.05)
                if await self._is_last(data, give_up):
                    return

    async def _publish(self, data: bytes, headers: dict[str, str] | None) -> int:
        reply = await self._client.request(
            self.subject,
            data,
            timeout=REQUEST_TIMEOUT_S,
            headers={**(headers or {}), _HEADER_EXPECTED: str(self.last_seq), _HEADER_STREAM: LOG.name},
        )
        answer = msgspec.json.decode(reply.data)
        if "error" not in answer:
            return int(answer["seq"])
        if answer["error"].get("err_code") == WRONG_LAST_SEQUENCE:
            raise AppendRefused(f"{self.request_id}: another writer was first (expected sequence {self.last_seq})")
        raise APIError.from_error(answer["error"])

    async def _is_last(self, data: bytes, give_up: float) -> bool:
        """Whether the last stored record is the one just sent. Raises AppendRefused when it is somebody else's."""
        while True:
            try:
                seq, stored = await self._last_raw()
                break
            except RequestUnknown:
                seq, stored = 0, b""
                break
            except _GONE as error:
                if time.monotonic() >= give_up:
                    raise PublishFailed(f"{self.request_id}: log not reachable") from error
                await asyncio.sleep(0.1)
        if seq == self.last_seq:
            return False
        if stored == data:
            self.last_seq = seq
            return True
        raise AppendRefused(f"{self.request_id}: another writer was first (found sequence {seq})")

    async def last(self) -> LogEntry:
        """The newest record. Raises RequestUnknown, or BusError when NATS does not answer."""
        try:
            seq, data = await self._last_raw()
        except _GONE as error:
            raise PublishFailed(f"{self.request_id}: log not reachable: {error}") from error
        return LogEntry(seq, decode_record(data))

    async def _last_raw(self) -> tuple[int, bytes]:
        reply = await self._client.request(
            f"$JS.API.DIRECT.GET.{LOG.name}.{self.subject}", b"", timeout=REQUEST_TIMEOUT_S
        )
        headers = reply.headers or {}
        if headers.get("Status") == "404":
            raise RequestUnknown(f"{self.request_id}: no such request")
        if "Nats-Sequence" not in headers:
            raise APIError(code=int(headers.get("Status", 500)), description=headers.get("Description", ""))
        return int(headers["Nats-Sequence"]), reply.data

    async def read(self, after_seq: int = 0) -> list[LogEntry]:
        """All records behind `after_seq`, in order; empty when there are none. Raises PublishFailed without NATS."""
        entries: list[LogEntry] = []
        while True:
            try:
                batch, more = await self._read_batch(entries[-1].seq if entries else after_seq)
            except _GONE as error:
                raise PublishFailed(f"{self.request_id}: log not reachable: {error}") from error
            entries += batch
            if not more:
                return entries

    async def _read_batch(self, after_seq: int) -> tuple[list[LogEntry], bool]:
        """One batched direct get (ADR-31): the server streams the answers to an inbox and closes with a 204 status."""
        inbox = self._client.new_inbox()
        answers: asyncio.Queue[Msg] = asyncio.Queue()

        async def collect(message: Msg) -> None:
            answers.put_nowait(message)

        subscription = await self._client.subscribe(inbox, cb=collect)
        try:
            query = {"seq": after_seq + 1, "next_by_subj": self.subject, "batch": READ_BATCH}
            await self._client.publish(f"$JS.API.DIRECT.GET.{LOG.name}", msgspec.json.encode(query), reply=inbox)
            entries: list[LogEntry] = []
            while True:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    message = await answers.get()
                headers = message.headers or {}
                status = headers.get("Status")
                if status is None:
                    entries.append(LogEntry(int(headers["Nats-Sequence"]), decode_record(message.data)))
                elif status in {"204", "404"}:
                    # EOB tells how many matching messages are left beyond this batch.
                    return entries, int(headers.get("Nats-Num-Pending", 0)) > 0 and bool(entries)
                else:
                    raise APIError(code=int(status), description=headers.get("Description", ""))
        finally:
            await subscription.unsubscribe()

    async def state(self) -> LogState:
        """Read and fold the whole log; `last_seq` follows. Raises RequestUnknown for an empty log."""
        entries = await self.read()
        if not entries:
            raise RequestUnknown(f"{self.request_id}: no such request")
        state = LogState.replay(entries)
        self.last_seq = state.last_seq
        return state
