"""Every refusal and failure that a client can see, in OpenAI's error format."""

from __future__ import annotations

from typing import Any, Final

from shared.protocol.records import Ended, ErrorInfo

INVALID: Final = "invalid_request_error"
OVERLOADED: Final = "rate_limit_error"
SERVER: Final = "server_error"

CANCELLED_STATUS: Final = 499
"""What nginx and its kin answer for a client that closed its request. OpenAI's clients retry 408, 409, 429 and all from
500 on by themselves; work that somebody cancelled must not start again, so it is none of these."""

_STATUS_BY_CODE: Final = {
    "context_length_exceeded": 400,
    "request_too_large": 413,
    "cancelled": CANCELLED_STATUS,
    "queue_timeout": 503,
    "deadline_exceeded": 503,
    "queue_full": 503,
    "queue_unavailable": 503,
    "gateway_stopping": 503,
    "log_unreachable": 503,
}
STOPPING_RETRY_S: Final = 1
"""Told by a gateway that stops: another one, or the next one at its port, takes the client on."""

RETRIABLE: Final = frozenset({429, 503})
"""Statuses that tell a client to come again; each answer with one of them says when."""

_NOT_RETRIED: Final = frozenset({"cancelled", "queue_timeout", "deadline_exceeded"})
"""The caller has waited its full time already: its library must not wait again behind its back."""


class ApiError(Exception):
    """Answered to the client as it is: `status` is HTTP's, the rest is the body's `error` object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def info(self) -> ErrorInfo:
        return ErrorInfo(self.message, self.type, self.code, self.param)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def unknown_request(request_id: str) -> ApiError:
    return ApiError(404, f"No request {request_id!r}; it may be older than the log's retention.", code="not_found")


def unknown_model(model: str, served: str) -> ApiError:
    return ApiError(
        404,
        f"The model {model!r} does not exist here; this server has {served!r}.",
        param="model",
        code="model_not_found",
    )


def too_large(message: str) -> ApiError:
    return ApiError(413, message, code="request_too_large")


def overloaded(status: int, code: str, message: str, retry_after_s: int) -> ApiError:
    """429 or 503 for work that was not taken on; clients may try again."""
    return ApiError(
        status,
        message,
        type=OVERLOADED if status == 429 else SERVER,
        code=code,
        headers={"Retry-After": str(retry_after_s)},
    )


def internal() -> ApiError:
    return ApiError(500, "The gateway failed; its log has the cause.", type=SERVER, code="internal_error")


def from_info(error: ErrorInfo, retry_after_s: int | None = None) -> ApiError:
    """The HTTP answer for an error that a log ended with.

    `retry_after_s`: told where the error may pass with time; None for what is no answer of its own, as in a stream.
    """
    status = _STATUS_BY_CODE.get(error.code or "")
    if status is None:
        status = 400 if error.type == INVALID else 500
    headers = {}
    if status in RETRIABLE and retry_after_s is not None:
        headers["Retry-After"] = str(retry_after_s)
    if error.code in _NOT_RETRIED:
        headers["x-should-retry"] = "false"
    return ApiError(status, error.message, type=error.type, code=error.code, param=error.param, headers=headers)


def failure_of(ended: Ended) -> ErrorInfo | None:
    """Why a log ended without an answer; None when it has one."""
    if ended.error is not None:
        return ended.error
    if ended.reason == "cancelled":
        return ErrorInfo("The request was cancelled.", "cancelled", "cancelled")
    if ended.reason == "error":
        return ErrorInfo("The request failed; no cause was recorded.", SERVER, "internal_error")
    return None
