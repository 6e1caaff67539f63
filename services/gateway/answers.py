"""The answers that follow a request's logs: a new generation, streamed or whole, and the rest of an earlier stream.

Each is one coroutine from the first byte read to the last byte sent, so that whatever it holds is let go at its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

import msgspec
import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.admission import Ticket
from services.gateway.deadlines import Deadlines, Overdue
from services.gateway.drafts import priority_of
from services.gateway.errors import ApiError, failure_of, from_info, internal
from services.gateway.follow import ChoiceEntry, ClientGone, FollowedLog, Follower
from services.gateway.gateway import Gateway
from services.gateway.http_body import read_body
from services.gateway.metrics import Observation
from services.gateway.openai_schema import parse_call, parse_json
from services.gateway.positions import Position
from services.gateway.results import Transcript, completion_body
from services.gateway.sse import SseConnection, disconnected
from services.gateway.streaming import PING, EventStream, error_event
from services.gateway.terms import parse_terms
from shared.protocol.records import Accepted, Api
from shared.telemetry import extract_context

STILL_RUNNING: Final = frozenset({"gateway_stopping", "log_unreachable"})
CLIENT_GONE: Final = ApiError(499, "The client went away.", code="client_gone")

log = structlog.get_logger(__name__)


class JsonBody(Response):
    """A JSON response, encoded as everything else is."""

    media_type = "application/json"

    def __init__(self, content: object, status_code: int = 200, headers: dict[str, str] | None = None) -> None:
        super().__init__(msgspec.json.encode(content), status_code, headers)


def error_response(error: ApiError) -> Response:
    return JsonBody(error.body(), error.status, error.headers)


class Generation(Response):
    """Answers POST /v1/chat/completions and /v1/completions. A client that leaves has its request cancelled."""

    def __init__(self, gateway: Gateway, api: Api) -> None:
        super().__init__()
        self._gateway = gateway
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway, request = self._gateway, Request(scope, receive, send)
        observation = Observation(gateway.metrics, self._api, gateway.model.name, extract_context(request.headers))
        failure: ApiError | None = internal()
        try:
            async with AsyncExitStack() as held:
                failure = await self._serve(request, send, observation, held)
        except ApiError as error:
            failure = error
            await error_response(error)(scope, receive, send)
        except (ClientGone, ClientDisconnect):
            failure = CLIENT_GONE
            observation.disconnected()
        finally:
            observation.close(failure)

    async def _serve(
        self, request: Request, send: Send, observation: Observation, held: AsyncExitStack
    ) -> ApiError | None:
        """Admit and answer. Returns the failure that a stream ended with; raises ApiError while it can be an answer."""
        gateway, settings = self._gateway, self._gateway.settings
        tenant = gateway.keyring.tenant(request.headers.get("authorization"))
        held.enter_context(gateway.limits.slots())
        body = await read_body(request, settings.max_body_bytes, settings.body_timeout_s)
        call = parse_call(parse_json(body), self._api)
        terms = parse_terms(request.headers, call, settings)
        observation.called(call)
        ticket = await gateway.admission.accept(
            call, tenant, terms, trace_headers=observation.trace_headers(), held=held
        )
        accepted = ticket.accepted
        observation.accepted(ticket, user=call.user)
        await held.enter_async_context(gateway.attachments.attach(accepted))
        logs = followed_logs(ticket)
        follower = make_follower(gateway, logs, ticket.choices, request.receive)
        async with follower:
            try:
                if call.stream:
                    events = EventStream(
                        accepted, gateway.fingerprint, gateway.tokens, include_usage=call.include_usage
                    )
                    connection = SseConnection(send, settings.send_timeout_s)
                    return await stream(connection, follower, events, accepted, observation)
                await self._whole(request, send, follower, ticket, observation)
            except ClientGone:
                gateway.attachments.left(ticket.choices)
                raise
            except ApiError as error:
                error.headers |= generation_headers(accepted)
                if error.code in STILL_RUNNING:
                    # With a key a library's retry joins the run; without one it would start another.
                    error.headers["x-should-retry"] = "true" if accepted.body_digest else "false"
                raise
            finally:
                self._end_with_the_failed(ticket.choices, logs)
        return None

    async def _whole(
        self, request: Request, send: Send, follower: Follower, ticket: Ticket, observation: Observation
    ) -> None:
        """Answer when the logs have ended. Raises ApiError for a run that failed."""
        transcript = Transcript(len(ticket.parts))
        async for found in follower:
            if found is not None:
                transcript.apply(*found)
                observation.record(*found)
        if (failure := transcript.failure) is not None:
            retry_after_s = self._gateway.limits.backlog.retry_after_s(priority_of(ticket.accepted))
            raise from_info(failure, retry_after_s)
        if not transcript.ended:
            raise internal()
        body = completion_body(transcript, self._gateway.fingerprint, self._gateway.tokens)
        headers = generation_headers(ticket.accepted)
        await JsonBody(body, headers=headers)(request.scope, request.receive, send)

    def _end_with_the_failed(self, choices: Sequence[Accepted], logs: Mapping[int, FollowedLog]) -> None:
        """When one choice has failed there is no answer, so the others stop, with the same cause in their logs."""
        failed = [f.ended for f in logs.values() if f.ended is not None and failure_of(f.ended) is not None]
        if failed:
            running = [choices[choice] for choice, followed in logs.items() if followed.ended is None]
            self._gateway.endings.request_all(running, failed[0].reason, failed[0].error)


class Continuation(Response):
    """Answers GET .../{id}?stream=true: the request's events behind `after`. A client that leaves changes nothing."""

    def __init__(
        self, gateway: Gateway, transcript: Transcript, history: Iterable[ChoiceEntry], after: Position
    ) -> None:
        """`history` is what `transcript` was read from: the records of all logs so far."""
        super().__init__()
        self._gateway = gateway
        self._transcript = transcript
        self._history = history
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway, accepted = self._gateway, self._transcript.accepted
        choices = self._transcript.openings
        events = EventStream(
            accepted,
            gateway.fingerprint,
            gateway.tokens,
            include_usage=accepted.include_usage,
            after=self._after,
        )
        try:
            async with AsyncExitStack() as held:
                held.enter_context(gateway.limits.slots(len(choices)))
                await held.enter_async_context(gateway.attachments.attach(accepted))
                logs = await self._follow_the_rest(held)
                follower = make_follower(gateway, logs, choices, receive)
                connection = SseConnection(send, gateway.settings.send_timeout_s)
                async with follower:
                    await stream(connection, follower, events, accepted, None, self._history)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
        except ClientGone:
            log.info("continuation_left", request_id=accepted.request_id)

    async def _follow_the_rest(self, held: AsyncExitStack) -> dict[int, FollowedLog]:
        """The logs that have not ended, from where they were read to."""
        logs = {}
        for choice, (accepted, read) in enumerate(
            zip(self._transcript.openings, self._transcript.choices, strict=True)
        ):
            state = read.state
            if state.ended is None:
                reader = self._gateway.bus.follow(accepted.tenant, accepted.request_id, state.last_seq)
                entries = aiter(await held.enter_async_context(reader))
                deadlines = Deadlines.of(accepted, state.claims[0] if state.claims else None)
                logs[choice] = FollowedLog(entries, deadlines, bool(state.output_ids))
        return logs


async def stream(
    connection: SseConnection,
    follower: Follower,
    events: EventStream,
    accepted: Accepted,
    observation: Observation | None,
    history: Iterable[ChoiceEntry] = (),
) -> ApiError | None:
    """Send a request's events until it has ended. Returns the failure that it ended with. Raises ClientGone.

    `history`: records that the follower will not give again.
    """
    await connection.open(generation_headers(accepted))
    failure: ApiError | None = None
    try:
        for choice, entry in history:
            if data := events.encode(choice, entry):
                await connection.write(data)
        if not events.finished:
            async for found in follower:
                if data := PING if found is None else events.encode(*found):
                    await connection.write(data)
                if found is not None and observation is not None:
                    observation.record(*found)
        if events.failure is not None:
            failure = from_info(events.failure)
    except ClientGone:
        raise
    except Exception as error:
        if not isinstance(error, ApiError):
            log.exception("stream_failed", request_id=accepted.request_id)
        failure = error if isinstance(error, ApiError) else internal()
        await connection.write(error_event(failure))
    await connection.close()
    return failure


def followed_logs(ticket: Ticket) -> dict[int, FollowedLog]:
    """The logs of a request that was just taken on, each with the reader that was subscribed for it."""
    logs = {}
    for choice, part in enumerate(ticket.parts):
        if part.reader is None:
            raise internal()
        logs[choice] = FollowedLog(aiter(part.reader), part.deadlines)
    return logs


def make_follower(
    gateway: Gateway,
    logs: Mapping[int, FollowedLog],
    choices: Sequence[Accepted],
    receive: Receive,
) -> Follower:
    def on_overdue(choice: int, overdue: Overdue, has_output: bool) -> None:
        gateway.end_overdue(choices[choice], overdue, has_output)

    return Follower(
        logs,
        on_overdue=on_overdue,
        client_gone=partial(disconnected, receive),
        stopping=gateway.stopping,
        idle_s=gateway.settings.ping_interval_s,
        retry_after_s=gateway.settings.retry_after_s,
    )


def generation_headers(accepted: Accepted) -> dict[str, str]:
    """Beside the body: what a client needs to come back to the request, or to repeat it."""
    return {"x-headrace-request-id": accepted.request_id, "x-headrace-seed": str(accepted.seed)}
