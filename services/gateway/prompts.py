"""From messages or text to token ids, without holding up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from services.gateway.call import GenerationCall, Messages, TokenIds
from services.gateway.errors import ApiError, invalid
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

    async def token_ids(self, call: GenerationCall) -> list[list[int]]:
        """The token ids of each prompt, at least one each.

        Raises ApiError 400: refused by the template, or ids out of range (also in `stop_token_ids`, `logit_bias`).
        """
        self._check_range("stop_token_ids", call.stop_token_ids)
        self._check_range("logit_bias", call.logit_bias)
        match call.prompts[0]:
            case Messages(items) if sum(len(item["content"]) for item in items) <= INLINE_CHARS:
                prompts = self._render(items)
            case Messages(items):
                prompts = await self._in_thread(self._render, items)
            case _:
                prompts = await self._completion_ids(call)
        for n, ids in enumerate(prompts):
            if not ids:
                raise invalid("The prompt has no tokens.", _prompt_param(call, n))
        return prompts

    async def _completion_ids(self, call: GenerationCall) -> list[list[int]]:
        """All prompts are texts, or all are token ids."""
        prompts: list[list[int]] = []
        texts: list[str] = []
        for n, prompt in enumerate(call.prompts):
            if isinstance(prompt, TokenIds):
                self._check_range(_prompt_param(call, n), prompt.ids)
                prompts.append(prompt.ids)
            elif isinstance(prompt, str):
                texts.append(prompt)
        if not texts:
            return prompts
        if sum(map(len, texts)) <= INLINE_CHARS:
            return self._encode(texts)
        return await self._in_thread(self._encode, texts)

    async def prediction_ids(self, call: GenerationCall) -> list[int]:
        """The token ids of the predicted output; none where speculation is off, as nothing else makes use of them.

        Raises ApiError 400 for more than the context holds: no answer could be that long.
        """
        given = call.prediction
        if isinstance(given, TokenIds):
            return given.ids
        if not given or call.speculation == "off":
            return []
        if len(given) <= INLINE_CHARS:
            ids = self._continue([given])[0]
        else:
            ids = (await self._in_thread(self._continue, [given]))[0]
        if len(ids) > self.context_length:
            raise invalid(
                f"The prediction has {len(ids)} tokens; this model's context is {self.context_length}.",
                "prediction.content",
                "context_length_exceeded",
            )
        return ids

    def output_limit(self, call: GenerationCall, prompt_tokens: int, chat_default: int, prompt: int = 0) -> int:
        """The most output tokens of an answer to one of the prompts.

        Raises ApiError 400: `context_length_exceeded` when prompt and output do not fit, and for a larger `min_tokens`.
        """
        room = self.context_length - prompt_tokens
        if room < 1 or (call.max_tokens or 0) > room:
            raise self._overflow(call, prompt_tokens, _prompt_param(call, prompt))
        limit = call.max_tokens or min(room, chat_default if call.api == "chat" else COMPLETION_MAX_TOKENS)
        if call.min_tokens > limit:
            raise invalid(
                f"'min_tokens' is {call.min_tokens}, but the answer has {limit} tokens at most.",
                "min_tokens",
                "invalid_value",
            )
        return limit

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[T], list[list[int]]], argument: T) -> list[list[int]]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, argument)

    def _render(self, messages: list[dict[str, str]]) -> list[list[int]]:
        try:
            text = self._tokenizer.render_text(messages)
        except TemplateError as error:
            raise invalid(str(error), "messages") from error
        return self._encode([text], add_special_tokens=False)

    def _continue(self, texts: list[str]) -> list[list[int]]:
        return self._encode(texts, add_special_tokens=False)

    def _encode(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        # The batch call lets go of the interpreter lock; the plain one keeps it, so that a thread would not help.
        encodings = self._tokenizer.raw.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [list(encoding.ids) for encoding in encodings]

    def _check_range(self, param: str, ids: Iterable[int]) -> None:
        vocabulary = self._tokenizer.vocab_size
        if any(not 0 <= i < vocabulary for i in ids):
            raise invalid(f"Token ids of this model are 0 to {vocabulary - 1}.", param, "invalid_value")

    def _overflow(self, call: GenerationCall, prompt_tokens: int, param: str) -> ApiError:
        answer = f" and {call.max_tokens} for the answer" if call.max_tokens else ""
        return invalid(
            f"This model's context is {self.context_length} tokens, but the request needs {prompt_tokens} for the "
            f"prompt{answer}. Shorten one of them.",
            param,
            "context_length_exceeded",
        )


def _prompt_param(call: GenerationCall, prompt: int) -> str:
    if call.api == "chat":
        return "messages"
    return "prompt" if len(call.prompts) == 1 else f"prompt[{prompt}]"
