"""Finding an accepted request again, on any gateway: its state, the rest of its stream, and cancelling it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.answers import Continuation, JsonBody
from services.gateway.endings import Ending
from services.gateway.errors import SERVER, ApiError, invalid, overloaded, unknown_request
from services.gateway.gateway import Gateway
from services.gateway.results import Transcript, lookup_body
from services.gateway.streaming import START, Position
from shared.bus import BusError, RequestUnknown
from shared.protocol.records import Api

MAX_ID_CHARS = 128


async def look_up(gateway: Gateway, request: Request, api: Api, request_id: str) -> Response:
    """GET .../{id}: the state and the text so far, or with `stream=true` the events from where the client stopped."""
    transcript = await _read(gateway, request, api, request_id)
    if not _wants_stream(request):
        return JsonBody(lookup_body(transcript, gateway.fingerprint))
    after = START
    for param, text in (
        ("starting_after", request.query_params.get("starting_after")),
        ("last-event-id", request.headers.get("last-event-id")),
    ):
        if text is not None:
            after = Position.parse(text, request_id, param)
            if after.seq > transcript.state.last_seq:
                raise invalid(f"'{param}' lies behind the end of this stream.", param, "invalid_value")
            break
    return Continuation(gateway, transcript.state, transcript.accepted, after)


async def cancel(gateway: Gateway, request: Request, api: Api, request_id: str) -> Response:
    """End a request now and show how it stands. One that has ended stays as it is."""
    transcript = await _read(gateway, request, api, request_id)
    if transcript.state.ended is None:
        try:
            await gateway.endings.end(Ending(transcript.accepted, "cancelled"))
        except BusError as error:
            raise _unreachable(gateway, error) from error
        transcript = await _read(gateway, request, api, request_id)
    return JsonBody(lookup_body(transcript, gateway.fingerprint))


async def _read(gateway: Gateway, request: Request, api: Api, request_id: str) -> Transcript:
    """The log of the tenant's request. Raises ApiError 404, also for what belongs to somebody else."""
    tenant = gateway.keyring.tenant(request.headers.get("authorization"))
    if not request_id or len(request_id) > MAX_ID_CHARS:
        raise unknown_request(request_id[:MAX_ID_CHARS])
    try:
        entries = await gateway.bus.open_log(tenant, request_id).read()
    except RequestUnknown as error:
        raise unknown_request(request_id) from error
    except BusError as error:
        raise _unreachable(gateway, error) from error
    transcript = Transcript()
    try:
        for entry in entries:
            transcript.apply(entry)
    except ValueError as error:
        raise ApiError(500, "The request's log cannot be read.", type=SERVER, code="log_unreadable") from error
    if transcript.state.accepted is None or transcript.accepted.api != api:
        raise unknown_request(request_id)
    return transcript


def _wants_stream(request: Request) -> bool:
    value = request.query_params.get("stream", "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise invalid("'stream' must be true or false.", "stream", "invalid_value")
    return value in ("true", "1")


def _unreachable(gateway: Gateway, error: BusError) -> ApiError:
    return overloaded(503, "log_unreachable", f"NATS does not answer: {error}", gateway.settings.retry_after_s)
