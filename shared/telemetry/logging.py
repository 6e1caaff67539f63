"""Logs: structlog and the standard library through one renderer, JSON lines or a readable console.

The rule: a log line never holds prompt or completion text. It is kept by construction: values are scalars or short
flat lists of them, anything else appears as its type's name, keys that name content are withheld, and strings are cut.
Log ids, counts and codes.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Final, Literal

import msgspec
import structlog
from structlog.typing import EventDict, Processor

from shared.telemetry.tracebacks import describe_exception
from shared.telemetry.tracing import trace_ids

MAX_VALUE_CHARS: Final = 512
MAX_EVENT_CHARS: Final = 1024
MAX_ITEMS: Final = 16
MAX_KEYS: Final = 40

CONTENT_KEYS: Final = frozenset(
    {"body", "chunk", "completion", "content", "delta", "input", "messages", "output", "output_ids", "prompt"}
    | {"prompt_ids", "text", "token_ids", "tokens_text"}
)
"""Keys whose values would be what a user wrote or read. Their values are withheld, whatever they are."""

_WITHHELD: Final = "(withheld)"
_OWN_HANDLERS: Final = ("uvicorn", "uvicorn.error", "uvicorn.access", "nats", "fastapi", "transformers", "httpx")
_LIBRARIES_WARN: Final = (
    "httpx",
    "httpcore",
    "urllib3",
    "asyncio",
    "opentelemetry",
    "grpc",
    "transformers",
    "filelock",
)
_LIBRARIES_INFO: Final = ("uvicorn", "nats", "redis", "multipart", "openai")
_LARGEST_INT: Final = 1 << 63

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "json", "console"]


def configure_logging(service: str, instance: str, level: Level = "info", format: Format = "auto") -> None:
    """Send the logs of this process to stdout. `auto` is `console` on a terminal and `json` otherwise.

    Servers that bring their own logging set-up must be told not to use it (uvicorn: `log_config=None`). May be called
    again; the last call wins.
    """
    as_json = format == "json" or (format == "auto" and not sys.stdout.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        _Identity(service, instance),
        _bound_values,
    ]
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _renderer(as_json)],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _OWN_HANDLERS:
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    # Libraries may print what they carry at debug level (bodies, headers): they never get below these levels.
    for names, floor in ((_LIBRARIES_WARN, logging.WARNING), (_LIBRARIES_INFO, logging.INFO)):
        for name in names:
            logging.getLogger(name).setLevel(max(floor, root.level))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


class _Identity:
    """Adds who speaks and in which trace. Ids that a caller bound itself stay."""

    def __init__(self, service: str, instance: str) -> None:
        self._service = service
        self._instance = instance

    def __call__(self, _logger: object, _method: str, event: EventDict) -> EventDict:
        event.setdefault("service", self._service)
        event.setdefault("instance", self._instance)
        if "trace_id" not in event:
            event.update(trace_ids())
        return event


def _bound_values(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Make every value small and free of content, and turn `exc_info` into text."""
    exception = event.pop("exc_info", None)
    if exception is True:
        exception = sys.exc_info()
    if isinstance(exception, tuple):
        exception = exception[1]
    event.pop("stack_info", None)
    bounded: dict[str, Any] = {}
    for key, value in event.items():
        if key.startswith("_"):  # structlog's own
            bounded[key] = value
        elif len(bounded) >= MAX_KEYS:
            bounded["keys_dropped"] = True
        elif key == "event":
            bounded[key] = _cut(str(value), MAX_EVENT_CHARS)
        else:
            bounded[key] = _WITHHELD if key in CONTENT_KEYS else _bound_value(value)
    if isinstance(exception, BaseException):
        bounded["exception"] = describe_exception(exception)
    return bounded


def _bound_value(value: object) -> object:
    if isinstance(value, str):
        return _cut(value, MAX_VALUE_CHARS)
    if isinstance(value, list | tuple | set | frozenset):
        items = [_bound_value(item) if _is_scalar(item) else _type_name(item) for item in list(value)[:MAX_ITEMS]]
        return items if len(value) <= MAX_ITEMS else [*items, f"({len(value) - MAX_ITEMS} more)"]
    if isinstance(value, BaseException):
        return _cut(f"{type(value).__name__}: {value}", MAX_VALUE_CHARS)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _LARGEST_INT:
        return _cut(str(value), MAX_VALUE_CHARS)
    return value if _is_scalar(value) else _type_name(value)


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


def _type_name(value: object) -> str:
    return f"<{type(value).__name__}>"


def _cut(text: str, limit: int) -> str:
    if len(text) > limit:
        text = f"{text[:limit]}...({len(text) - limit} more)"
    # A lone surrogate (from a decoded file name, say) cannot be written as UTF-8.
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _renderer(as_json: bool) -> Processor:
    if as_json:
        return _render_json
    return structlog.dev.ConsoleRenderer(colors=sys.stdout.isatty(), timestamp_key="time", pad_event_to=28)


def _render_json(_logger: object, _method: str, event: MutableMapping[str, Any]) -> str:
    first = {key: event.pop(key, None) for key in ("time", "level", "event")}
    return msgspec.json.encode({**first, **event}).decode()
