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

MAX_RUNS = 4096
"""Runs of instances remembered at most."""

RECONNECT_CHECK_S = 0.1
"""How often an announcer without a connection looks for one, so as to be heard while the others still wait for it."""

ANSWER_SPACING_S = 0.05
"""From one status to the next that somebody asked for."""

DEAF_S = 1.5 * STATUS_INTERVAL_S
"""How long after a (re)connection a living instance may still be unheard of."""

ORPHANED_S = 4.0
"""How long what a worker lost is looked for: its message comes back within the ack wait."""

NAMED_S = 10.0
"""How long it is remembered who named a request: longer than anybody looks for it."""

log = structlog.get_logger(__name__)


class StatusBoard:
    """The last status of each run of an instance, forgotten after `STATUS_TTL_S` of silence."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Stage, str], tuple[float, InstanceStatus]] = {}
        """By stage and worker: a new run may come up while the one before still winds down."""
        self._named: dict[str, tuple[float, str]] = {}
        """When and by what run a request was last named as held; what is older than `NAMED_S` is forgotten."""
        self._deaf_until_s = 0.0

    def live(self, stage: Stage | None = None, model: str | None = None) -> list[InstanceStatus]:
        """Statuses heard within the time to live, by instance name; of one stage and model where given.

        Of several runs of one instance the latest counts.
        """
        oldest = time.monotonic() - STATUS_TTL_S
        latest: dict[tuple[Stage, str], InstanceStatus] = {}
        for heard, status in self._seen.values():
            key = (status.stage, status.instance)
            if heard >= oldest and (key not in latest or latest[key].started_unix_s <= status.started_unix_s):
                latest[key] = status
        return [
            status
            for _, status in sorted(latest.items())
            if stage in (None, status.stage) and model in (None, "", status.model)
        ]

    def holder_alive_s(self, worker: str, request_id: str, within_s: float, claimed_unix_s: float = 0.0) -> float:
        """For how long from now the named run of a worker counts as working on this request: until what it said last
        is `within_s` old. 0 when it counts as gone.

        `claimed_unix_s` is when it claimed the request, by its own clock: what it said before does not tell that it
        does not work on it, only that it was there.

        Right after (re)connecting nobody had the chance to say anything, and every worker counts as alive, unless a
        later run of its instance is there.
        """
        now = time.monotonic()
        instance = worker.rpartition(".")[0]
        replaced, fresh_s = False, 0.0
        for heard, status in self._seen.values():
            if status.worker == worker:
                if heard + within_s > now:
                    if request_id in status.holds:
                        return heard + within_s - now
                    if status.sent_unix_s >= claimed_unix_s:
                        return 0.0
                    fresh_s = heard + within_s - now
            elif status.instance == instance and heard >= self._deaf_until_s - DEAF_S:
                replaced = True
        return max(fresh_s, 0.0 if replaced else self._deaf_until_s - now)

    def missing(self, stage: Stage, model: str, within_s: float) -> int:
        """How many requests may be without a holder: those that a run of this stage named when it was heard last, that
        is more than `within_s` ago, or says to have let go, and that nobody has named since; at least one for each run
        that died, which may have claimed more since it spoke.

        0 right after (re)connecting, when nobody had the chance to say anything.
        """
        now = time.monotonic()
        if now < self._deaf_until_s:
            return 0
        lost: set[str] = set()
        unheard = 0
        for heard, status in self._seen.values():
            if (status.stage, status.model) != (stage, model) or now - heard >= within_s + ORPHANED_S:
                continue
            died = now - heard >= within_s
            names = [*status.let_go, *(status.holds if died else [])]
            left = {name for name in names if name not in self._named or self._named[name][1] == status.worker}
            lost |= left
            unheard += died and status.state != "draining" and not left
        return len(lost) + unheard

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
        if len(self._seen) >= MAX_RUNS:
            self._seen = {k: v for k, v in self._seen.items() if v[0] >= now - STATUS_TTL_S}
        self._seen[(status.stage, status.worker)] = (now, status)
        if status.holds:
            self._named = {name: by for name, by in self._named.items() if now - by[0] < NAMED_S}
            self._named.update(dict.fromkeys(status.holds, (now, status.worker)))


class Announcer:
    """Publishes this instance's status every second and when somebody asks, and as soon as it is connected again.

    Everybody hears every answer, so however many ask there is one in ANSWER_SPACING_S at most.
    """

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
                sent = await self.publish()
                earliest_s = time.monotonic() + ANSWER_SPACING_S
                try:
                    async with asyncio.timeout(STATUS_INTERVAL_S if sent else RECONNECT_CHECK_S):
                        await self._asked.wait()
                    await asyncio.sleep(earliest_s - time.monotonic())
                except TimeoutError:
                    pass
                self._asked.clear()
        finally:
            if not self._client.is_closed:
                await subscription.unsubscribe()

    async def publish(self) -> bool:
        """Now, whatever the time. False when there is no connection."""
        if not self._client.is_connected:  # a status is worth nothing later, so it is not buffered
            return False
        status = self._report()
        try:
            await self._client.publish(status_subject(status.stage, status.instance), encode_status(status))
        except nats.errors.Error as error:
            log.warning("status_not_sent", error=str(error))
        return True
