"""From messages or text to token ids, without holding up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from services.gateway.errors import ApiError, invalid
from services.gateway.openai_schema import GenerationCall, Messages, TokenIds
from shared.models import ChatTokenizer, TemplateError

T = TypeVar("T")

INLINE_CHARS: Final = 4_000
"""About a millisecond of tokenizing; longer texts go to a thread."""

TOKENIZER_THREADS: Final = 2
COMPLETION_MAX_TOKENS: Final = 16
"""OpenAI's default for the completions API."""


class Prompter:
    """Renders and tokenizes prompts, and checks them against the model's vocabulary and context."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenize")

    @property
    def context_length(self) -> int:
        return self._tokenizer.context_length

    async def token_ids(self, call: GenerationCall) -> list[int]:
        """The prompt's token ids, at least one. Raises ApiError 400: refused by the template, or ids out of range."""
        self._check_range("stop_token_ids", call.stop_token_ids)
        match call.prompt:
            case TokenIds(ids):
                self._check_range("prompt", ids)
            case Messages(items) if sum(len(item["content"]) for item in items) <= INLINE_CHARS:
                ids = self._render(items)
            case Messages(items):
                ids = await self._in_thread(self._render, items)
            case str(text) if len(text) <= INLINE_CHARS:
                ids = self._encode(text)
            case text:
                ids = await self._in_thread(self._encode, text)
        if not ids:
            raise invalid("The prompt has no tokens.", _prompt_param(call))
        return ids

    def max_tokens(self, call: GenerationCall, prompt_tokens: int, chat_default: int) -> int:
        """The output limit. Raises ApiError 400 `context_length_exceeded` when prompt and output do not fit."""
        room = self.context_length - prompt_tokens
        if room < 1 or (call.max_tokens or 0) > room:
            raise self._overflow(call, prompt_tokens)
        return call.max_tokens or min(room, chat_default if call.api == "chat" else COMPLETION_MAX_TOKENS)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[T], list[int]], argument: T) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, argument)

    def _render(self, messages: list[dict[str, str]]) -> list[int]:
        try:
            text = self._tokenizer.render_text(messages)
        except TemplateError as error:
            raise invalid(str(error), "messages") from error
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        # The batch call lets go of the interpreter lock; the plain one keeps it, so that a thread would not help.
        return list(self._tokenizer.raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def _check_range(self, param: str, ids: list[int]) -> None:
        vocabulary = self._tokenizer.vocab_size
        if any(not 0 <= i < vocabulary for i in ids):
            raise invalid(f"Token ids of this model are 0 to {vocabulary - 1}.", param, "invalid_value")

    def _overflow(self, call: GenerationCall, prompt_tokens: int) -> ApiError:
        answer = f" and {call.max_tokens} for the answer" if call.max_tokens else ""
        return invalid(
            f"This model's context is {self.context_length} tokens, but the request needs {prompt_tokens} for the "
            f"prompt{answer}. Shorten one of them.",
            _prompt_param(call),
            "context_length_exceeded",
        )


def _prompt_param(call: GenerationCall) -> str:
    return "messages" if call.api == "chat" else "prompt"
