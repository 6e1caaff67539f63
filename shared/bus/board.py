"""Who is there: every instance's status as it arrives, and the announcing of one's own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg

from shared.protocol.status import STATUS_INTERVAL_S, STATUS_TTL_S, InstanceStatus, decode_status, encode_status
from shared.protocol.subjects import STATUS_PING, Stage, status_subject

MAX_INSTANCES = 4096

DEAF_S = 1.5 * STATUS_INTERVAL_S
"""How long after a (re)connection a living instance may still be unheard of."""

log = structlog.get_logger(__name__)


class StatusBoard:
    """The last status of each instance, forgotten after `STATUS_TTL_S` of silence."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Stage, str], tuple[float, InstanceStatus]] = {}
        self._deaf_until_s = 0.0

    def live(self, stage: Stage | None = None, model: str | None = None) -> list[InstanceStatus]:
        """Statuses heard within the time to live, by instance name; of one stage and model where given."""
        oldest = time.monotonic() - STATUS_TTL_S
        return sorted(
            (
                status
                for heard, status in self._seen.values()
                if heard >= oldest and stage in (None, status.stage) and model in (None, "", status.model)
            ),
            key=lambda status: (status.stage, status.instance),
        )

    def holder_alive(self, worker: str, request_id: str, within_s: float) -> bool:
        """Whether the named run of a worker said within `within_s` that it works on this request.

        Right after (re)connecting nobody had the chance to say so, and every worker counts as alive.
        """
        now = time.monotonic()
        instance = worker.rpartition(".")[0]
        for heard, status in self._seen.values():
            if status.worker == worker and heard >= now - within_s:
                return request_id in status.holds
            if status.instance == instance and status.worker != worker:
                return False  # a later run of the same instance
        return now < self._deaf_until_s

    def heard_nothing_yet(self) -> None:
        """The connection was made (again) just now."""
        self._deaf_until_s = time.monotonic() + DEAF_S

    async def on_status(self, message: Msg) -> None:
        try:
            status = decode_status(message.data)
        except msgspec.DecodeError as error:
            log.warning("status_unreadable", subject=message.subject, error=str(error))
            return
        now = time.monotonic()
        if len(self._seen) >= MAX_INSTANCES:
            self._seen = {k: v for k, v in self._seen.items() if v[0] >= now - STATUS_TTL_S}
        self._seen[(status.stage, status.instance)] = (now, status)


class Announcer:
    """Publishes this instance's status every second and when somebody asks."""

    def __init__(self, client: Client, report: Callable[[], InstanceStatus]) -> None:
        self._client = client
        self._report = report
        self._asked = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""

        async def on_ping(_: Msg) -> None:
            self._asked.set()

        subscription = await self._client.subscribe(STATUS_PING, cb=on_ping)
        try:
            while True:
                await self.publish()
                try:
                    async with asyncio.timeout(STATUS_INTERVAL_S):
                        await self._asked.wait()
                except TimeoutError:
                    pass
                self._asked.clear()
        finally:
            if not self._client.is_closed:
                await subscription.unsubscribe()

    async def publish(self) -> None:
        """Now, whatever the time."""
        if not self._client.is_connected:  # a status is worth nothing later, so it is not buffered
            return
        status = self._report()
        try:
            await self._client.publish(status_subject(status.stage, status.instance), encode_status(status))
        except nats.errors.Error as error:
            log.warning("status_not_sent", error=str(error))
