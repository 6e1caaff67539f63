"""From a request's logs to OpenAI's response objects. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from services.gateway.errors import ApiError, failure_of
from services.gateway.logprobs import LogprobWriter, joined
from shared.bus import LogEntry, LogState
from shared.models import TokenBytes
from shared.protocol.records import Accepted, Api, Ended, ErrorInfo, Tokens, Usage, choice_request_id

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


def usage_of(choices: Iterable[tuple[Accepted, Ended]]) -> Usage:
    """The usage of a whole request: each prompt once, as its first answer found it, and every answer."""
    prompts: dict[int, tuple[int, int]] = {}
    completion = drafted = accepted_tokens = 0
    for accepted, ended in choices:
        prompts.setdefault(accepted.prompt, (accepted.prompt_tokens, ended.usage.cached_tokens))
        completion += ended.usage.completion_tokens
        drafted += ended.usage.drafted_tokens
        accepted_tokens += ended.usage.accepted_tokens
    prompt, cached = (sum(counts) for counts in zip(*prompts.values(), strict=True))
    return Usage(prompt, completion, cached, drafted, accepted_tokens)


def prompt_tokens_of(choices: Iterable[Accepted]) -> int:
    """Tokens of a request's prompts, each counted once however many answers continue it."""
    return sum({accepted.prompt: accepted.prompt_tokens for accepted in choices}.values())


class ChoiceTranscript:
    """One log as read so far, with its tokens. Raises ValueError for a log whose token indexes do not continue."""

    def __init__(self) -> None:
        self.state = LogState()
        self._tokens: list[Tokens] = []

    def apply(self, entry: LogEntry) -> None:
        self.state.apply(entry)
        if isinstance(entry.record, Tokens):
            self._tokens.append(entry.record)

    @property
    def text(self) -> str:
        return "".join(record.text for record in self._tokens)

    @property
    def failure(self) -> ErrorInfo | None:
        return None if self.state.ended is None else failure_of(self.state.ended)

    def logprobs(self, tokens: TokenBytes) -> dict[str, Any] | None:
        if self.state.accepted is None:
            return None
        writer = LogprobWriter(self.state.accepted, tokens)
        return joined(writer.body(record) for record in self._tokens)


class Transcript:
    """All logs of a request as read so far. A log that is not begun yet counts as queued."""

    def __init__(self, choices: int = 1) -> None:
        self.choices = [ChoiceTranscript() for _ in range(choices)]

    def apply(self, choice: int, entry: LogEntry) -> None:
        self.choices[choice].apply(entry)

    @property
    def accepted(self) -> Accepted:
        """Raises ValueError for a log that does not begin with it."""
        accepted = self.choices[0].state.accepted
        if accepted is None:
            raise ValueError("the log does not begin with an accepted record")
        return accepted

    @property
    def openings(self) -> list[Accepted]:
        """Each choice's first record; for a log that is not begun yet what names it."""
        first = self.accepted
        return [
            read.state.accepted
            or msgspec.structs.replace(first, request_id=choice_request_id(first.request_id, n), choice=n)
            for n, read in enumerate(self.choices)
        ]

    @property
    def failure(self) -> ErrorInfo | None:
        """Why there is no whole answer: what ended the first choice that failed, in the stream's order."""
        failed = [choice for choice in self.choices if choice.failure is not None]
        return min(failed, key=lambda choice: choice.state.last_seq).failure if failed else None

    @property
    def ended(self) -> bool:
        """Every choice has ended, well or not."""
        return all(choice.state.ended is not None for choice in self.choices)

    @property
    def usage(self) -> Usage | None:
        """None until every choice has ended."""
        pairs = [(choice.state.accepted, choice.state.ended) for choice in self.choices]
        known = [(accepted, ended) for accepted, ended in pairs if accepted is not None and ended is not None]
        return usage_of(known) if len(known) == len(pairs) else None

    @property
    def status(self) -> str:
        """`queued`, `in_progress`, `completed`, `cancelled` or `failed`."""
        if (failure := self.failure) is not None:
            return "cancelled" if failure.code == "cancelled" else "failed"
        if self.ended:
            return "completed"
        begun = any(choice.state.claims or choice.state.ended is not None for choice in self.choices)
        return "in_progress" if begun else "queued"


def completion_body(transcript: Transcript, fingerprint: str, tokens: TokenBytes) -> dict[str, Any]:
    """The response of a request that is not streamed, finished or not. `usage` is null until it is known."""
    accepted, usage = transcript.accepted, transcript.usage
    return {
        "id": accepted.request_id,
        "object": OBJECTS[accepted.api],
        "created": int(accepted.created_unix_s),
        "model": accepted.model,
        "system_fingerprint": fingerprint,
        "choices": [_choice_body(n, choice, accepted.api, tokens) for n, choice in enumerate(transcript.choices)],
        "usage": usage_body(usage) if usage is not None else None,
        "seed": accepted.seed,
    }


def _choice_body(index: int, choice: ChoiceTranscript, api: Api, tokens: TokenBytes) -> dict[str, Any]:
    accepted, ended = choice.state.accepted, choice.state.ended
    body: dict[str, Any] = {
        "index": index,
        "logprobs": choice.logprobs(tokens),
        "finish_reason": ended.reason if ended is not None and choice.failure is None else None,
        "seed": accepted.seed if accepted is not None else None,
    }
    if api == "chat":
        body["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
    else:
        body["text"] = choice.text
    return body


def lookup_body(transcript: Transcript, fingerprint: str, tokens: TokenBytes) -> dict[str, Any]:
    """What GET answers: the response so far, its `status`, and the `error` that ended it."""
    failure = transcript.failure
    error = (
        ApiError(500, failure.message, type=failure.type, code=failure.code, param=failure.param) if failure else None
    )
    return {
        **completion_body(transcript, fingerprint, tokens),
        "status": transcript.status,
        "error": error.body()["error"] if error is not None else None,
    }
