"""The request bodies of OpenAI's chat and completions APIs: what is accepted, and what it amounts to.

Strict: nothing is converted, unknown fields are refused, and a refusal names the field. No I/O.
"""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationError
from pydantic_core import PydanticCustomError

from services.gateway.call import GenerationCall, Messages, Prompt, TokenIds
from services.gateway.errors import ApiError, invalid
from services.gateway.unsupported import same, without_neutral
from shared.protocol.records import Api
from shared.protocol.subjects import Priority

MAX_SEED: Final = 2**63 - 1
MAX_STOPS: Final = 4
MAX_MESSAGES: Final = 4096
MAX_BIASES: Final = 300
MAX_BIAS: Final = 100.0
MAX_N: Final = 128
"""OpenAI's; each gateway has a lower bound of its own (`max_n`)."""

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")

_NEUTRAL: Final[dict[str, Any]] = {
    "n": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "min_tokens": 0,
    "logprobs": False,
    "top_logprobs": 0,
}
"""Values that ask for nothing: with them a request is the same as without the field."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class TextPart(_Strict):
    type: Literal["text"]
    text: str


_BRANCHES: Final = frozenset({"<text>", "<parts>"})


def _content_kind(value: object) -> str:
    return "<parts>" if isinstance(value, list) else "<text>"


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TextPart], Field(min_length=1), Tag("<parts>")],
    Discriminator(_content_kind),
]


def _text_of(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    def rendered(self) -> dict[str, str]:
        """For the chat template. Several text parts become lines; `developer` is OpenAI's newer name of `system`."""
        return {"role": "system" if self.role == "developer" else self.role, "content": _text_of(self.content)}


class Prediction(_Strict):
    """OpenAI's predicted output: a text that much of the answer is likely to repeat."""

    type: Literal["content"]
    content: Content


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: Literal[False] | None = None


def _one_or_more(value: object) -> object:
    return [value] if isinstance(value, str) else value


Stop = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=256)]],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_one_or_more),
]


def _biases(value: object) -> object:
    """OpenAI's object of token ids, as strings, to biases. Strict about both, and about their number."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise PydanticCustomError("bias_type", "must be an object of token ids and biases")
    if len(value) > MAX_BIASES:
        raise PydanticCustomError("bias_count", f"must have at most {MAX_BIASES} entries")
    biases = {}
    for token_id, bias in value.items():
        if not _TOKEN_ID.fullmatch(token_id):
            raise PydanticCustomError("bias_token", "every key must be a token id in decimal digits")
        if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise PydanticCustomError("bias_value", f"every bias must be a number from -{MAX_BIAS:g} to {MAX_BIAS:g}")
        biases[int(token_id)] = float(bias)
    return biases


class _Common(_Strict):
    model: str = Field(min_length=1, max_length=512)
    n: int | None = Field(None, ge=1, le=MAX_N)
    best_of: int | None = Field(None, ge=1, le=MAX_N, description="Only equal to n")
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=1_000_000, description="0 or -1: off")
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=2)
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_biases)] = None
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    stop: Stop | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(None, max_length=64)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=512)
    speculation: Literal["auto", "off"] | None = None
    priority: Priority | None = None
    queue_timeout_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    timeout_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    background: bool | None = None


class ChatBody(_Common):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1)
    prediction: Prediction | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20, description="Needs logprobs")


def _prompts(value: object) -> object:
    """One text, one list of token ids, or a list of either: always as a list of prompts."""
    several = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    prompts = value if several and isinstance(value, list) else [value]
    if all(isinstance(prompt, str) for prompt in prompts) or all(_is_ids(prompt) for prompt in prompts):
        if not all(prompts):
            raise PydanticCustomError("empty_prompt", "a prompt is empty")
        return prompts
    raise PydanticCustomError("prompt_type", "must be a string or a list of token ids, or a list of either")


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


class CompletionBody(_Common):
    """POST /v1/completions."""

    prompt: Annotated[list[str] | list[list[int]], BeforeValidator(_prompts)]
    logprobs: int | None = Field(None, ge=0, le=5)


def parse_json(body: bytes) -> dict[str, Any]:
    """The body's JSON object. Raises ApiError 400 for bad UTF-8, bad JSON, and anything but an object."""
    try:
        body.decode("utf-8")  # for a message of its own; msgspec checks it too
        value = msgspec.json.decode(body)
    except UnicodeDecodeError as error:
        raise invalid(f"The body is not valid UTF-8 (byte {error.start}).", code="invalid_json") from error
    except RecursionError as error:
        raise invalid("The body is not usable JSON: nested too deeply.", code="invalid_json") from error
    except (msgspec.DecodeError, ValueError) as error:  # ValueError: an integer of thousands of digits
        raise invalid(f"The body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(value, dict):
        raise invalid("The body must be a JSON object.", code="invalid_json")
    return value


def parse_call(fields: dict[str, Any], api: Api) -> GenerationCall:
    """Validate a request. Raises ApiError 400 that names the first field at fault."""
    kept = without_neutral(fields, api)
    try:
        body: ChatBody | CompletionBody = (ChatBody if api == "chat" else CompletionBody).model_validate(kept)
    except ValidationError as error:
        raise _explain(error) from error
    if body.stream_options is not None and not body.stream:
        raise invalid("'stream_options' is only allowed when 'stream' is true.", "stream_options")
    n = body.n or 1
    if (body.best_of or n) != n:
        raise invalid("'best_of' is only supported equal to 'n'.", "best_of", "unsupported_parameter")
    return GenerationCall(
        api=api,
        model=body.model,
        prompts=_prompts_of(body),
        n=n,
        max_tokens=_max_tokens(body),
        min_tokens=body.min_tokens or 0,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        logit_bias=body.logit_bias or {},
        logprobs=_logprobs(body),
        seed=body.seed,
        stop=body.stop or [],
        stop_token_ids=body.stop_token_ids or [],
        ignore_eos=bool(body.ignore_eos),
        speculation=body.speculation or "auto",
        priority=body.priority or "normal",
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        user=body.user or "",
        digest=_digest(body),
        queue_timeout_s=body.queue_timeout_s,
        timeout_s=body.timeout_s,
        background=bool(body.background),
        prediction=_prediction(body),
    )


def _prompts_of(body: ChatBody | CompletionBody) -> tuple[Prompt, ...]:
    if isinstance(body, ChatBody):
        return (Messages([message.rendered() for message in body.messages]),)
    return tuple(prompt if isinstance(prompt, str) else TokenIds(prompt) for prompt in body.prompt)


def _prediction(body: ChatBody | CompletionBody) -> str:
    given = body.prediction if isinstance(body, ChatBody) else None
    return _text_of(given.content) if given is not None else ""


def _logprobs(body: ChatBody | CompletionBody) -> int | None:
    """How many alternatives are asked for: by two fields in chats, by one for completions."""
    if isinstance(body, CompletionBody):
        return body.logprobs
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise invalid("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")
    return None


def _max_tokens(body: ChatBody | CompletionBody) -> int | None:
    newer = body.max_completion_tokens if isinstance(body, ChatBody) else None
    if newer is not None and body.max_tokens is not None and newer != body.max_tokens:
        raise invalid(
            "'max_tokens' and 'max_completion_tokens' mean the same and differ; send one.", "max_completion_tokens"
        )
    return body.max_tokens if newer is None else newer


def _digest(body: BaseModel) -> str:
    without = {
        "stream", "stream_options", "user", "priority", "speculation", "prediction", "best_of",
        "queue_timeout_s", "timeout_s", "background",
    }  # fmt: skip
    fields = {
        name: value
        for name, value in body.model_dump(exclude=without, exclude_none=True).items()
        if name not in _NEUTRAL or not same(value, _NEUTRAL[name])
    }
    if biases := fields.pop("logit_bias", None):
        fields["logit_bias"] = sorted(biases.items())
    return hashlib.sha256(msgspec.json.encode(fields, order="sorted")).hexdigest()[:32]


def _explain(error: ValidationError) -> ApiError:
    """The first complaint, in OpenAI's words. Never quotes the value: it may be a prompt."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    param = _path(first["loc"])
    match first["type"]:
        case "missing":
            return invalid(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
        case "extra_forbidden":
            return invalid(f"Unknown parameter: '{param}'.", param, "unknown_parameter")
        case _:
            return invalid(f"Invalid value for '{param}': {first['msg']}.", param, "invalid_value")


def _path(loc: tuple[int | str, ...]) -> str:
    """`messages[0].content[1].type`. Names in angle brackets are branches of a union, not fields."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _BRANCHES:
            path += f".{part[:128]}" if path else part[:128]
    return path
