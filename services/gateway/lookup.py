"""Finding an accepted request again, on any gateway: its state, the rest of its stream, and cancelling it."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.answers import Continuation, JsonBody
from services.gateway.endings import Ending
from services.gateway.errors import SERVER, ApiError, invalid, overloaded, unknown_request
from services.gateway.follow import ChoiceEntry
from services.gateway.gateway import Gateway
from services.gateway.positions import Position
from services.gateway.results import Transcript, lookup_body
from shared.bus import BusError, LogEntry, RequestUnknown
from shared.protocol.records import Accepted, Api, choice_request_id

MAX_ID_CHARS = 128


async def look_up(gateway: Gateway, request: Request, api: Api, request_id: str) -> Response:
    """GET .../{id}: the state and the text so far, or with `stream=true` the events from where the client stopped."""
    transcript, history = await _read(gateway, request, api, request_id)
    if not _wants_stream(request):
        return JsonBody(lookup_body(transcript, gateway.fingerprint, gateway.tokens))
    choices = len(transcript.choices)
    after = Position.start(choices)
    for param, text in (
        ("starting_after", request.query_params.get("starting_after")),
        ("last-event-id", request.headers.get("last-event-id")),
    ):
        if text is not None:
            after = Position.parse(text, request_id, choices, param)
            if any(seq > read.state.last_seq for seq, read in zip(after.seqs, transcript.choices, strict=True)):
                raise invalid(f"'{param}' lies behind the end of this stream.", param, "invalid_value")
            break
    return Continuation(gateway, transcript, history, after)


async def cancel(gateway: Gateway, request: Request, api: Api, request_id: str) -> Response:
    """End a request now, with all its choices, and show how it stands. What has ended stays as it is."""
    transcript, _ = await _read(gateway, request, api, request_id)
    if not transcript.ended:
        for accepted, read in zip(transcript.openings, transcript.choices, strict=True):
            if read.state.ended is None:
                await _cancel_choice(gateway, accepted)
        transcript, _ = await _read(gateway, request, api, request_id)
    return JsonBody(lookup_body(transcript, gateway.fingerprint, gateway.tokens))


async def _cancel_choice(gateway: Gateway, accepted: Accepted) -> None:
    try:
        await gateway.endings.end(Ending(accepted, "cancelled"))
    except RequestUnknown:
        return  # its gateway died before it began this log; whoever would begin it now finds the others ended
    except BusError as error:
        raise _unreachable(gateway, error) from error


async def _read(gateway: Gateway, request: Request, api: Api, request_id: str) -> tuple[Transcript, list[ChoiceEntry]]:
    """The logs of the tenant's request, and their records in the order of the stream.

    Raises ApiError 404, also for what belongs to somebody else.
    """
    tenant = gateway.keyring.tenant(request.headers.get("authorization"))
    if not request_id or len(request_id) > MAX_ID_CHARS:
        raise unknown_request(request_id[:MAX_ID_CHARS])
    logs = [await _read_log(gateway, tenant, request_id)]
    accepted = logs[0][0].record if logs[0] else None
    if not isinstance(accepted, Accepted) or accepted.api != api or accepted.choice != 0:
        raise unknown_request(request_id)
    for choice in range(1, accepted.choices):
        logs.append(await _read_log(gateway, tenant, choice_request_id(request_id, choice)))
    history = [(choice, entry) for choice, entries in enumerate(logs) for entry in entries]
    history.sort(key=lambda found: found[1].seq)
    transcript = Transcript(accepted.choices)
    try:
        for choice, entry in history:
            transcript.apply(choice, entry)
    except ValueError as error:
        raise _unreadable() from error
    return transcript, history


async def _read_log(gateway: Gateway, tenant: str, request_id: str) -> list[LogEntry]:
    """The records of one choice's log; empty when there is none."""
    try:
        return await gateway.bus.open_log(tenant, request_id).read()
    except RequestUnknown:
        return []
    except BusError as error:
        raise _unreachable(gateway, error) from error
    except (msgspec.DecodeError, ValueError) as error:
        raise _unreadable() from error


def _wants_stream(request: Request) -> bool:
    value = request.query_params.get("stream", "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise invalid("'stream' must be true or false.", "stream", "invalid_value")
    return value in ("true", "1")


def _unreachable(gateway: Gateway, error: BusError) -> ApiError:
    return overloaded(503, "log_unreachable", f"NATS does not answer: {error}", gateway.settings.retry_after_s)


def _unreadable() -> ApiError:
    return ApiError(500, "The request's log cannot be read.", type=SERVER, code="log_unreadable")
