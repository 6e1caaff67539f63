"""The answers that follow a log: a new generation, streamed or whole, and the rest of an earlier stream.

Each is one coroutine from the first byte read to the last byte sent, so that whatever it holds is let go at its end.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from typing import Final

import msgspec
import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.deadlines import Deadlines
from services.gateway.errors import ApiError, failure_of, from_info, internal
from services.gateway.follow import ClientGone, Follower
from services.gateway.gateway import Gateway
from services.gateway.http_body import read_body
from services.gateway.metrics import Observation
from services.gateway.openai_schema import parse_call, parse_json
from services.gateway.results import Transcript, completion_body
from services.gateway.sse import SseConnection, disconnected
from services.gateway.streaming import PING, EventStream, Position, error_event
from services.gateway.terms import parse_terms
from shared.bus import LogReader, LogState
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
        terms = parse_terms(request.headers, settings)
        held.enter_context(gateway.limits.slot())
        body = await read_body(request, settings.max_body_bytes, settings.body_timeout_s)
        call = parse_call(parse_json(body), self._api)
        observation.called(call)
        ticket = await gateway.admission.accept(
            call, tenant, terms, trace_headers=observation.trace_headers(), follow_in=held
        )
        accepted = ticket.accepted
        observation.accepted(accepted, joined=ticket.joined, user=call.user)
        if ticket.reader is None:
            raise internal()
        await held.enter_async_context(gateway.attachments.attach(accepted))
        follower = make_follower(gateway, ticket.reader, accepted, ticket.deadlines, request.receive)
        async with follower:
            try:
                if call.stream:
                    events = EventStream(accepted, gateway.fingerprint, include_usage=call.include_usage)
                    return await stream(gateway, follower, events, accepted, send, observation)
                await self._whole(request, send, follower, accepted, observation)
            except ClientGone:
                gateway.attachments.left(accepted)
                raise
            except ApiError as error:
                error.headers |= generation_headers(accepted)
                if error.code in STILL_RUNNING:
                    # With a key a library's retry joins the run; without one it would start another.
                    error.headers["x-should-retry"] = "true" if accepted.body_digest else "false"
                raise
        return None

    async def _whole(
        self, request: Request, send: Send, follower: Follower, accepted: Accepted, observation: Observation
    ) -> None:
        """Answer when the log has ended. Raises ApiError for a run that failed."""
        transcript = Transcript()
        async for entry in follower:
            if entry is not None:
                transcript.apply(entry)
                observation.record(entry.record)
        ended = transcript.state.ended
        if ended is None:
            raise internal()
        if (failure := failure_of(ended)) is not None:
            raise from_info(failure)
        body = completion_body(transcript, self._gateway.fingerprint)
        await JsonBody(body, headers=generation_headers(accepted))(request.scope, request.receive, send)


class Continuation(Response):
    """Answers GET .../{id}?stream=true: the request's events behind `after`. A client that leaves changes nothing."""

    def __init__(self, gateway: Gateway, state: LogState, accepted: Accepted, after: Position) -> None:
        super().__init__()
        self._gateway = gateway
        self._state = state
        self._accepted = accepted
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway, accepted, state = self._gateway, self._accepted, self._state
        events = EventStream(accepted, gateway.fingerprint, include_usage=accepted.include_usage, after=self._after)
        try:
            async with AsyncExitStack() as held:
                held.enter_context(gateway.limits.slot())
                await held.enter_async_context(gateway.attachments.attach(accepted))
                # The record that `after` names is read again: it may have events that the client has not seen.
                reader = await held.enter_async_context(
                    gateway.bus.follow(accepted.tenant, accepted.request_id, max(0, self._after.seq - 1))
                )
                deadlines = Deadlines(accepted.deadline_unix_s)
                follower = make_follower(gateway, reader, accepted, deadlines, receive, bool(state.output_ids))
                async with follower:
                    await stream(gateway, follower, events, accepted, send, None)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
        except ClientGone:
            log.info("continuation_left", request_id=accepted.request_id)


async def stream(
    gateway: Gateway,
    follower: Follower,
    events: EventStream,
    accepted: Accepted,
    send: Send,
    observation: Observation | None,
) -> ApiError | None:
    """Send a request's events until its log ends. Returns the failure that it ended with. Raises ClientGone."""
    connection = SseConnection(send, gateway.settings.send_timeout_s)
    await connection.open(generation_headers(accepted))
    failure: ApiError | None = None
    try:
        async for entry in follower:
            data = PING if entry is None else events.encode(entry)
            if data:
                await connection.write(data)
            if entry is not None and observation is not None:
                observation.record(entry.record)
            if entry is not None and (error := events.failure(entry)) is not None:
                failure = from_info(error)
    except ClientGone:
        raise
    except Exception as error:
        if not isinstance(error, ApiError):
            log.exception("stream_failed", request_id=accepted.request_id)
        failure = error if isinstance(error, ApiError) else internal()
        await connection.write(error_event(failure))
    await connection.close()
    return failure


def make_follower(
    gateway: Gateway,
    reader: LogReader,
    accepted: Accepted,
    deadlines: Deadlines,
    receive: Receive,
    has_output: bool = False,
) -> Follower:
    return Follower(
        aiter(reader),
        deadlines,
        has_output=has_output,
        on_overdue=partial(gateway.end_overdue, accepted),
        client_gone=partial(disconnected, receive),
        stopping=gateway.stopping,
        idle_s=gateway.settings.ping_interval_s,
    )


def generation_headers(accepted: Accepted) -> dict[str, str]:
    """Beside the body: what a client needs to come back to the request, or to repeat it."""
    return {"x-headrace-request-id": accepted.request_id, "x-headrace-seed": str(accepted.seed)}
