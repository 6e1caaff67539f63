"""Names of NATS subjects. Every subject that Headrace uses is built here and nowhere else.

Tokens of a subject may not hold dots, blanks or wildcards, so model and tenant names are encoded with `encode_token`.
"""

from __future__ import annotations

import re
from typing import Final, Literal

Stage = Literal["gateway", "prefill", "decode", "draft", "kvstore"]
Priority = Literal["high", "normal", "low"]

STAGES: Final[tuple[Stage, ...]] = ("gateway", "prefill", "decode", "draft", "kvstore")
PRIORITIES: Final[tuple[Priority, ...]] = ("high", "normal", "low")

SUBMIT: Final = "hr.submit"
"""Request/reply: NATS clients submit work here; every gateway answers from one queue group."""

CANCEL: Final = "hr.ctl.cancel"
"""Broadcast hint that a request has ended. The log's terminal record is the truth; this only makes it known sooner."""

RETRY: Final = "hr.ctl.retry"
"""Request/reply, for operators: a gateway queues the work of a dead letter, named by its stream sequence, again."""

STATUS_PING: Final = "hr.ctl.ping"
"""Broadcast: every instance answers at once with a fresh status on its own status subject."""

_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")
_ESCAPED = re.compile(r"=([0-9a-f]+)=")


def encode_token(name: str) -> str:
    """Encode any name as one subject token: `Qwen2.5` becomes `Qwen2=2e=5`. Raises ValueError when empty."""
    if not name:
        raise ValueError("a subject token cannot be empty")
    return _UNSAFE.sub(lambda m: f"={ord(m.group()):x}=", name)


def decode_token(token: str) -> str:
    """Undo `encode_token`. Raises ValueError for what that cannot have made."""
    try:
        return _ESCAPED.sub(lambda m: chr(int(m.group(1), 16)), token)
    except OverflowError as error:
        raise ValueError("the subject token names a character that does not exist") from error


def log_subject(tenant: str, request_id: str) -> str:
    """The request's log. Append only with an expected last sequence; never subscribe to it (see docs/protocol.md)."""
    return f"hr.tok.{encode_token(tenant)}.{encode_token(request_id)}"


def live_subject(tenant: str, request_id: str) -> str:
    """Where the server republishes each stored record of the request's log, in order."""
    return f"hr.live.{encode_token(tenant)}.{encode_token(request_id)}"


def request_subject(model: str, priority: Priority, tenant: str, request_id: str) -> str:
    """Accepted work that waits for prefill; one message per request."""
    return f"hr.req.{encode_token(model)}.{priority}.{encode_token(tenant)}.{encode_token(request_id)}"


def request_filter(model: str, priority: Priority) -> str:
    return f"hr.req.{encode_token(model)}.{priority}.*.*"


def job_subject(model: str, priority: Priority, tenant: str, request_id: str) -> str:
    """Prefilled work that waits for decode; one message per request."""
    return f"hr.job.{encode_token(model)}.{priority}.{encode_token(tenant)}.{encode_token(request_id)}"


def job_filter(model: str, priority: Priority) -> str:
    return f"hr.job.{encode_token(model)}.{priority}.*.*"


def tenant_filters(tenant: str) -> tuple[str, str]:
    """A tenant's unfinished requests, of all models and priorities: in the request streams and in the job stream."""
    return f"hr.req.*.*.{encode_token(tenant)}.*", f"hr.job.*.*.{encode_token(tenant)}.*"


def dead_subject(stage: Stage, tenant: str, request_id: str) -> str:
    """Dead letters: work that was given up, with its cause."""
    return f"hr.dead.{stage}.{encode_token(tenant)}.{encode_token(request_id)}"


def attached_subject(tenant: str, request_id: str) -> str:
    """Core NATS, between gateways: whoever follows the request answers here."""
    return f"hr.gw.attached.{encode_token(tenant)}.{encode_token(request_id)}"


def status_subject(stage: Stage, instance: str) -> str:
    return f"hr.status.{stage}.{encode_token(instance)}"


def draft_subject(model: str, instance: str) -> str:
    """Core NATS: decode sends contexts to one drafter."""
    return f"hr.draft.{encode_token(model)}.{encode_token(instance)}"


def proposal_subject(instance: str) -> str:
    """Core NATS: drafters answer to one decode worker."""
    return f"hr.prop.{encode_token(instance)}"
