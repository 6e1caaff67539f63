"""`headrace dead`: reads the dead-letter stream, and has a gateway queue the work of a dead letter again.

Prompts stay unread unless they are asked for: dead letters are looked at by operators, not by the tenant.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
import nats.errors
from nats.js.api import RawStreamMsg
from nats.js.errors import APIError, NotFoundError

from services.cli.errors import NoDeadLetter, RetryFailed
from shared.bus import Bus, PublishFailed
from shared.protocol.jobs import GenerationRequest, SamplingParams, decode_request
from shared.protocol.streams import DEAD
from shared.protocol.subjects import RETRY

RETRY_WAIT_S: Final = 10.0
"""A gateway admits the request and waits for two confirmations of NATS before it answers."""


class DeadLetter(msgspec.Struct, frozen=True):
    """Work that was given up. Of a message that could not be read, `request_id` and what follows it is empty."""

    seq: int
    buried_unix_s: float
    stage: str
    cause: str
    crashed: list[str]
    """The workers that crashed while they ran it."""
    request_id: str = ""
    tenant: str = ""
    model: str = ""
    api: str = ""
    priority: str = ""
    created_unix_s: float = 0.0
    prompt_tokens: int = 0
    params: SamplingParams | None = None
    prompt_ids: list[int] = []


class Retried(msgspec.Struct, frozen=True):
    """A gateway's answer: the new request's id, and the subjects of its log and its live records."""

    request_id: str
    tenant: str
    log_subject: str
    live_subject: str


async def newest(bus: Bus, limit: int) -> list[DeadLetter]:
    """The last `limit` dead letters, oldest first. Raises PublishFailed when NATS does not answer."""
    kept: deque[DeadLetter] = deque(maxlen=limit)
    async for letter in _from(bus, 1):
        kept.append(letter)
    return list(kept)


async def read(bus: Bus, seq: int) -> DeadLetter:
    """One dead letter with its prompt. Raises NoDeadLetter; PublishFailed when NATS does not answer."""
    async for letter in _from(bus, seq):
        if letter.seq == seq:
            return letter
        break
    raise NoDeadLetter(f"no dead letter {seq}; `headrace dead list` shows which there are")


async def count_dead(bus: Bus) -> int:
    """Raises PublishFailed when NATS does not answer."""
    try:
        return (await bus.js.stream_info(DEAD.name)).state.messages
    except (nats.errors.Error, APIError, TimeoutError) as error:
        raise PublishFailed(f"the dead letters cannot be counted: {error}") from error


async def retry(bus: Bus, seq: int) -> Retried:
    """Have a gateway queue the work again, under a new id. Raises RetryFailed."""
    try:
        reply = await bus.client.request(RETRY, msgspec.json.encode({"seq": seq}), timeout=RETRY_WAIT_S)
    except nats.errors.NoRespondersError as error:
        raise RetryFailed("no gateway runs, and only gateways queue work; see `headrace status`") from error
    except (nats.errors.Error, TimeoutError) as error:
        raise RetryFailed(
            f"no gateway answered within {RETRY_WAIT_S:.0f} s; whether {seq} was queued, `headrace dead list` tells"
        ) from error
    try:
        answer: dict[str, Any] = msgspec.json.decode(reply.data, type=dict[str, Any])
        if "error" in answer:
            raise RetryFailed(f"the gateway refused to retry {seq}: {answer['error'].get('message', answer['error'])}")
        return msgspec.convert(answer, Retried)
    except (msgspec.MsgspecError, AttributeError) as error:
        raise RetryFailed(f"the gateway's answer about {seq} cannot be read: {error}") from error


async def _from(bus: Bus, seq: int) -> AsyncIterator[DeadLetter]:
    """Those with this sequence number or a later one."""
    while True:
        try:
            message = await bus.js.get_msg(DEAD.name, seq=seq, subject=DEAD.subjects[0], next=True)
        except NotFoundError:
            return
        except (nats.errors.Error, APIError, TimeoutError) as error:
            raise PublishFailed(f"the dead letters cannot be read: {error}") from error
        yield _letter(message)
        seq = (message.seq or seq) + 1


def _letter(message: RawStreamMsg) -> DeadLetter:
    headers = message.headers or {}
    parts = (message.subject or "").split(".")  # hr.dead.STAGE.TENANT.REQUEST, or hr.dead.STAGE.unreadable
    letter = DeadLetter(
        seq=message.seq or 0,
        buried_unix_s=message.time.timestamp() if message.time else 0.0,
        stage=headers.get("Headrace-Stage") or parts[2],
        cause=headers.get("Headrace-Cause", ""),
        crashed=[worker for worker in headers.get("Headrace-Claims", "").split(",") if worker],
    )
    try:
        request = decode_request(message.data or b"")
    except msgspec.DecodeError:
        return letter
    return _with_request(letter, request)


def _with_request(letter: DeadLetter, request: GenerationRequest) -> DeadLetter:
    return msgspec.structs.replace(
        letter,
        request_id=request.request_id,
        tenant=request.tenant,
        model=request.model,
        api=request.api,
        priority=request.priority,
        created_unix_s=request.created_unix_s,
        prompt_tokens=len(request.prompt_ids),
        params=request.params,
        prompt_ids=request.prompt_ids,
    )
