"""What a caller asks for around a generation, over HTTP and NATS alike: time-outs and the idempotency key."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from services.gateway.call import GenerationCall
from services.gateway.errors import invalid
from services.gateway.settings import GatewaySettings
from shared.protocol.records import Api

QUEUE_TIMEOUT: Final = "x-headrace-queue-timeout-s"
TIMEOUT: Final = "x-headrace-timeout-s"
IDEMPOTENCY_KEY: Final = "idempotency-key"
MAX_KEY_CHARS: Final = 255

_PREFIX: Final[dict[Api, str]] = {"chat": "chatcmpl-", "completion": "cmpl-"}


@dataclass(frozen=True)
class Terms:
    """`queue_timeout_s` bounds the wait for the first worker, `timeout_s` the time from then on."""

    queue_timeout_s: float
    timeout_s: float
    idempotency_key: str | None = None


def parse_terms(headers: Mapping[str, str], call: GenerationCall, settings: GatewaySettings) -> Terms:
    """From headers, whose names are in lower case, and body fields. Raises ApiError 400 naming the header.

    A header goes before the field of the same meaning, so that a proxy can set one. Larger values than the gateway
    allows are cut to that.
    """
    queue_timeout_s = _seconds(headers, QUEUE_TIMEOUT, call.queue_timeout_s or settings.queue_timeout_s)
    timeout_s = _seconds(headers, TIMEOUT, call.timeout_s or settings.timeout_s)
    key = headers.get(IDEMPOTENCY_KEY)
    if key is not None and not (0 < len(key) <= MAX_KEY_CHARS and key.isprintable()):
        raise invalid(f"'{IDEMPOTENCY_KEY}' must have 1 to {MAX_KEY_CHARS} printable characters.", IDEMPOTENCY_KEY)
    return Terms(min(queue_timeout_s, settings.max_timeout_s), min(timeout_s, settings.max_timeout_s), key)


def new_request_id(api: Api) -> str:
    return _PREFIX[api] + secrets.token_hex(12)


def keyed_request_id(api: Api, tenant: str, key: str, attempt: int) -> str:
    """The same on every gateway, so that the log itself finds the first run. `attempt` counts failed runs before."""
    parts = "\0".join((tenant, key, api, str(attempt)))
    return _PREFIX[api] + hashlib.sha256(parts.encode()).hexdigest()[:24]


def _seconds(headers: Mapping[str, str], name: str, default: float) -> float:
    text = headers.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise invalid(f"'{name}' must be a number of seconds above 0.", name, "invalid_value")
    return value
