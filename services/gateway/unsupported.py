"""Parameters that Headrace knows but does not do: taken with a value that changes nothing, refused with any other."""

from __future__ import annotations

from typing import Any, Final

from services.gateway.errors import invalid
from shared.protocol.records import Api

# Parameter -> the values that ask for nothing. Null is always one of them.
_BOTH: Final[dict[str, tuple[Any, ...]]] = {
    "length_penalty": (1,),
    "skip_special_tokens": (True,),
    "use_beam_search": (False,),
    "metadata": ({},),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "prompt_cache_key": (),
    "safety_identifier": (),
}
_CHAT: Final[dict[str, tuple[Any, ...]]] = {
    **_BOTH,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
_COMPLETION: Final[dict[str, tuple[Any, ...]]] = {
    **_BOTH,
    "echo": (False,),
    "suffix": ("",),
}
_MESSAGE: Final[dict[str, tuple[Any, ...]]] = {
    "name": (),
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "reasoning_content": ("",),
}
"""Clients send an assistant's message back as they got it, empty fields included."""


def without_neutral(body: dict[str, Any], api: Api) -> dict[str, Any]:
    """The body's supported and unknown fields. Raises ApiError 400 naming a parameter that asks for something else."""
    kept = _filter(body, _CHAT if api == "chat" else _COMPLETION, "")
    if api == "chat" and isinstance(messages := kept.get("messages"), list):
        kept["messages"] = [
            _filter(message, _MESSAGE, f"messages[{i}].") if isinstance(message, dict) else message
            for i, message in enumerate(messages)
        ]
    return kept


def _filter(fields: dict[str, Any], neutral: dict[str, tuple[Any, ...]], prefix: str) -> dict[str, Any]:
    kept = {}
    for name, value in fields.items():
        if name not in neutral:
            kept[name] = value
        elif value is not None and not any(same(value, allowed) for allowed in neutral[name]):
            raise invalid(
                f"The parameter '{prefix}{name}' is not supported yet; leave it out.",
                prefix + name,
                "unsupported_parameter",
            )
    return kept


def same(value: object, allowed: object) -> bool:
    """Equal as JSON: true is not 1, though Python says so."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
