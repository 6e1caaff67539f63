"""Text to token ids and back, and messages to a prompt by the model's own chat template. Needs no torch.

Incremental detokenization is the engine's; it works on `ChatTokenizer.raw`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from shared.models.errors import ModelUnusable, TemplateError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True)
class ChatTokenizer:
    """A model's tokenizer and chat template.

    `eos_token_ids` end a sequence. `vocab_size` bounds valid ids (rows of the embedding). `context_length`: tokens.
    """

    raw: Tokenizer
    eos_token_ids: frozenset[int]
    vocab_size: int
    context_length: int
    _template: jinja2.Template | None
    _special_tokens: Mapping[str, str]

    @classmethod
    def load(cls, path: Path) -> ChatTokenizer:
        """Read the tokenizer of a model directory. Raises ModelUnusable."""
        config = _read_json(path / "config.json", required=True)
        tokenizer_config = _read_json(path / "tokenizer_config.json")
        generation = _read_json(path / "generation_config.json")
        try:
            raw = Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # the library raises plain Exception
            raise ModelUnusable(f"{path / 'tokenizer.json'} cannot be read: {error}") from error
        raw.no_truncation()
        raw.no_padding()
        special = {key: text for key in _SPECIAL_TOKENS if (text := _token_text(tokenizer_config.get(key)))}
        return cls(
            raw=raw,
            eos_token_ids=_eos_ids(raw, special, generation, config),
            vocab_size=_config_int(config, "vocab_size", raw.get_vocab_size()),
            context_length=_config_int(config, "max_position_embeddings", 2048),
            _template=_load_template(path, tokenizer_config),
            _special_tokens=special,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of plain text; markers such as a leading BOS are added where the model expects them."""
        return list(self.raw.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self.raw.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def render_text(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt that `render_chat` tokenizes. Raises TemplateError."""
        if self._template is None:
            raise TemplateError("this model has no chat template; use the completions API")
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except TemplateError:
            raise
        except Exception as error:  # template code is the model's: it may fail in any way
            raise TemplateError(f"the model's chat template refused the messages: {error}") from error

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, ending where the assistant's answer begins.

        Each message has `role` (system, user, assistant, tool) and `content`. Raises TemplateError.
        """
        return self.encode(self.render_text(messages), add_special_tokens=False)


class _GenerationBlock(Extension):
    """`{% generation %}` marks training targets in some templates; it renders its body."""

    tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _load_template(path: Path, tokenizer_config: Mapping[str, Any]) -> jinja2.Template | None:
    source = _template_source(path, tokenizer_config)
    if source is None:
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().astimezone().strftime(pattern)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelUnusable(f"the chat template in {path} is broken: {error}") from error


def _template_source(path: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """A file of its own wins over tokenizer_config.json, where it is a text or a list of named ones."""
    separate = path / "chat_template.jinja"
    if separate.is_file():
        return separate.read_text("utf-8")
    found = _read_json(path / "chat_template.json").get("chat_template") or tokenizer_config.get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found if isinstance(found, str) else None


def _to_json(value: object, indent: int | None = None) -> str:
    """Templates were trained on plain JSON; Jinja's own filter would escape for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise TemplateError(f"the model's chat template refused the messages: {message}")


def _eos_ids(raw: Tokenizer, special: Mapping[str, str], *configs: Mapping[str, Any]) -> frozenset[int]:
    """All ids that any of the model's files calls end of sequence; where base and chat model disagree, either ends."""
    ids: set[int] = set()
    for config in configs:
        found = config.get("eos_token_id")
        ids.update(found if isinstance(found, list) else [] if found is None else [found])
    if (text := special.get("eos_token")) and (token := raw.token_to_id(text)) is not None:
        ids.add(token)
    return frozenset(ids)


def _token_text(value: object) -> str:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def _config_int(config: Mapping[str, Any], key: str, default: int) -> int:
    """A field of the text model's config, which multimodal configs nest."""
    value = config.get(key, config.get("text_config", {}).get(key))
    return value if isinstance(value, int) else default


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError as error:
        if required:
            raise ModelUnusable(f"{path.parent} has no {path.name}") from error
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelUnusable(f"{path} cannot be read: {error}") from error
