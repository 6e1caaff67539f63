"""The request bodies of OpenAI's chat and completions APIs: what is accepted, and what it amounts to.

Strict: nothing is converted, unknown fields are refused, and a refusal names the field. No I/O.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationError
from pydantic_core import PydanticCustomError

from services.gateway.errors import ApiError, invalid
from services.gateway.unsupported import without_neutral
from shared.protocol.records import Api
from shared.protocol.subjects import Priority

MAX_SEED: Final = 2**63 - 1
MAX_STOPS: Final = 4
MAX_MESSAGES: Final = 4096


@dataclass(frozen=True)
class Messages:
    """A conversation for the chat template: `role` and `content` of each message."""

    items: list[dict[str, str]]


@dataclass(frozen=True)
class TokenIds:
    ids: list[int]


@dataclass(frozen=True)
class GenerationCall:
    """A validated request, the same for HTTP and NATS.

    `digest` covers all that decides the output, so that a retry under an idempotency key can be told from a mix-up.
    """

    api: Api
    model: str
    prompt: Messages | TokenIds | str
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    speculation: Literal["auto", "off"]
    priority: Priority
    stream: bool
    include_usage: bool
    user: str
    digest: str


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


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    def rendered(self) -> dict[str, str]:
        """For the chat template. Several text parts become lines; `developer` is OpenAI's newer name of `system`."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


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


class _Common(_Strict):
    model: str = Field(min_length=1, max_length=512)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=1_000_000, description="0 or -1: off")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    stop: Stop | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(None, max_length=64)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=512)
    speculation: Literal["auto", "off"] | None = None
    priority: Priority | None = None


class ChatBody(_Common):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1)


def _prompt(value: object) -> object:
    """One text, or one list of token ids; a list that holds exactly one of them stands for it."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise PydanticCustomError(
                "several_prompts", "several prompts in one request are not supported yet; send one each"
            )
        value = value[0]
    if isinstance(value, str) or (isinstance(value, list) and all(type(item) is int for item in value)):
        if not value:
            raise PydanticCustomError("empty_prompt", "the prompt is empty")
        return value
    raise PydanticCustomError("prompt_type", "must be a string or a list of token ids")


class CompletionBody(_Common):
    """POST /v1/completions."""

    prompt: Annotated[str | list[int], BeforeValidator(_prompt)]


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
    return GenerationCall(
        api=api,
        model=body.model,
        prompt=_prompt_of(body),
        max_tokens=_max_tokens(body),
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
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
    )


def _prompt_of(body: ChatBody | CompletionBody) -> Messages | TokenIds | str:
    if isinstance(body, ChatBody):
        return Messages([message.rendered() for message in body.messages])
    return body.prompt if isinstance(body.prompt, str) else TokenIds(body.prompt)


def _max_tokens(body: ChatBody | CompletionBody) -> int | None:
    newer = body.max_completion_tokens if isinstance(body, ChatBody) else None
    if newer is not None and body.max_tokens is not None and newer != body.max_tokens:
        raise invalid(
            "'max_tokens' and 'max_completion_tokens' mean the same and differ; send one.", "max_completion_tokens"
        )
    return body.max_tokens if newer is None else newer


def _digest(body: BaseModel) -> str:
    fields = body.model_dump(exclude={"stream", "stream_options", "user", "priority", "speculation"}, exclude_none=True)
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
