"""From a request's log to OpenAI's response objects. Pure: no I/O, no clock."""

from __future__ import annotations

from typing import Any

from services.gateway.errors import ApiError, failure_of
from shared.bus import LogEntry, LogState
from shared.protocol.records import Accepted, Api, Ended, Tokens, Usage

OBJECTS: dict[Api, str] = {"chat": "chat.completion", "completion": "text_completion"}


def fingerprint_of(model_fingerprint: str) -> str:
    """OpenAI's `system_fingerprint`: the same for all gateways of the same weights."""
    return f"fp_{model_fingerprint[:12]}"


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": usage.accepted_tokens,
            "rejected_prediction_tokens": usage.drafted_tokens - usage.accepted_tokens,
        },
    }


class Transcript:
    """A log as read so far, with its text. Raises ValueError for a log whose token indexes do not continue."""

    def __init__(self) -> None:
        self.state = LogState()
        self._texts: list[str] = []

    def apply(self, entry: LogEntry) -> None:
        self.state.apply(entry)
        if isinstance(entry.record, Tokens) and entry.record.text:
            self._texts.append(entry.record.text)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def accepted(self) -> Accepted:
        """Raises ValueError for a log that does not begin with it."""
        if self.state.accepted is None:
            raise ValueError("the log does not begin with an accepted record")
        return self.state.accepted

    @property
    def status(self) -> str:
        """`queued`, `in_progress`, `completed`, `cancelled` or `failed`."""
        if self.state.ended is None:
            return "in_progress" if self.state.claims else "queued"
        if (failure := failure_of(self.state.ended)) is None:
            return "completed"
        return "cancelled" if failure.code == "cancelled" else "failed"


def completion_body(transcript: Transcript, fingerprint: str) -> dict[str, Any]:
    """The response of a request that is not streamed, finished or not. `usage` is null until it is known."""
    accepted, ended = transcript.accepted, transcript.state.ended
    reason = ended.reason if ended is not None and failure_of(ended) is None else None
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
    if accepted.api == "chat":
        choice["message"] = {"role": "assistant", "content": transcript.text, "refusal": None}
    else:
        choice["text"] = transcript.text
    return {
        "id": accepted.request_id,
        "object": OBJECTS[accepted.api],
        "created": int(accepted.created_unix_s),
        "model": accepted.model,
        "system_fingerprint": fingerprint,
        "choices": [choice],
        "usage": usage_body(ended.usage) if ended is not None else None,
        "seed": accepted.seed,
    }


def lookup_body(transcript: Transcript, fingerprint: str) -> dict[str, Any]:
    """What GET answers: the response so far, its `status`, and the `error` that ended it."""
    ended: Ended | None = transcript.state.ended
    failure = failure_of(ended) if ended is not None else None
    error = (
        ApiError(500, failure.message, type=failure.type, code=failure.code, param=failure.param) if failure else None
    )
    return {
        **completion_body(transcript, fingerprint),
        "status": transcript.status,
        "error": error.body()["error"] if error is not None else None,
    }
