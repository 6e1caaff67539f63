"""Takes over the queue of an earlier version, which kept requests of all priorities in one stream.

Its subjects overlap those of today's streams, so it lets go of them first, and its work moves when the new ones exist.
Any number of services may do this at once, and one that dies in between leaves the rest to the next.
"""

from __future__ import annotations

import structlog
from nats.js import JetStreamContext
from nats.js.api import RawStreamMsg
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from shared.protocol.streams import SINGLE_REQUESTS

_RETIRED = "hr.retired.>"
_STORED_ALREADY = {10071, 10164}

log = structlog.get_logger(__name__)


async def retire_single_stream(js: JetStreamContext) -> bool:
    """Free the subjects of the earlier version's stream; whether there is one. Raises what NATS raises."""
    try:
        config = (await js.stream_info(SINGLE_REQUESTS)).config
        if config.subjects != [_RETIRED]:
            await js.update_stream(config.evolve(subjects=[_RETIRED]))
    except NotFoundError:
        return False
    return True


async def move_requests(js: JetStreamContext) -> None:
    """Queue the earlier stream's work in the streams of today, and delete it. Raises what NATS raises.

    A worker of the earlier version that holds some of it goes on: its claim is in the request's log. What does not fit
    stays for the next start; gateways end it at its deadline.
    """
    moved = 0
    try:
        while (state := (await js.stream_info(SINGLE_REQUESTS)).state).messages:
            if not await _move(js, await js.get_msg(SINGLE_REQUESTS, seq=state.first_seq)):
                log.warning("requests_left_in_earlier_stream", stream=SINGLE_REQUESTS, count=state.messages)
                return
            await js.delete_msg(SINGLE_REQUESTS, state.first_seq)
            moved += 1
        await js.delete_stream(SINGLE_REQUESTS)
    except NotFoundError:
        pass  # somebody else was faster
    log.info("requests_moved_from_earlier_version", count=moved)


async def _move(js: JetStreamContext, message: RawStreamMsg) -> bool:
    """Whether the message is in one of today's streams now."""
    headers = {**(message.headers or {}), "Nats-Expected-Last-Subject-Sequence": "0"}
    headers.pop("Nats-Expected-Stream", None)
    try:
        await js.publish(message.subject or "", message.data or b"", headers=headers)
    except NoStreamResponseError:
        return False
    except APIError as error:
        return error.err_code in _STORED_ALREADY
    return True
