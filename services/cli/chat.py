"""`headrace chat`: a conversation in the terminal over the gateway's own HTTP interface, answers shown as they come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
from rich.console import Console

from services.cli.errors import ChatFailed

_CONNECT_S = 5.0
_SILENCE_S = 120.0
"""The gateway sends comments on an idle stream, so a longer silence means that it is gone."""
_HELP = "Ctrl-C stops an answer, Ctrl-D leaves, /new begins anew"


class Chat:
    """One conversation. `ask` yields the answer's text in pieces; `history` holds the messages so far."""

    def __init__(self, url: str, model: str, *, system: str, options: dict[str, Any], api_key: str) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(
            base_url=url,
            headers=headers,
            timeout=httpx.Timeout(_SILENCE_S, connect=_CONNECT_S),
            trust_env=False,
        )
        self._url = url
        self._model = model
        self._system = system
        self._options = options
        self.history: list[dict[str, str]] = []
        self.forget()

    def forget(self) -> None:
        self.history = [{"role": "system", "content": self._system}] if self._system else []

    def close(self) -> None:
        self._http.close()

    def model(self) -> str:
        """The model that is asked: the one given, else the first that the gateway serves. Raises ChatFailed."""
        if not self._model:
            try:
                reply = self._http.get("/v1/models").raise_for_status()
                self._model = str(reply.json()["data"][0]["id"])
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                raise ChatFailed(f"{self._url} does not say which model it serves: {error}") from error
        return self._model

    def ask(self, question: str) -> Iterator[str]:
        """Raises ChatFailed. What was received when the caller stops iterating is kept as the answer."""
        self.history.append({"role": "user", "content": question})
        answer = ""
        try:
            for piece in self._stream():
                answer += piece
                yield piece
        except ChatFailed:
            if not answer:
                self.history.pop()
            raise
        finally:
            if answer:
                self.history.append({"role": "assistant", "content": answer})

    def _stream(self) -> Iterator[str]:
        body = {"model": self.model(), "messages": self.history, "stream": True, **self._options}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as reply:
                if reply.is_error:
                    raise ChatFailed(_reason(reply.read(), reply.status_code))
                for line in reply.iter_lines():
                    if line == "data: [DONE]":
                        return
                    if line.startswith("data: "):
                        yield from _delta(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            raise ChatFailed(
                f"{self._url} does not answer ({error}); is the stack up? see `headrace status`"
            ) from error
        raise ChatFailed("the answer broke off: the gateway ended the stream early")


def converse(chat: Chat, console: Console) -> None:
    """Read questions until the end of input. Errors of one question do not end the conversation on a terminal."""
    if console.is_terminal:
        console.print(f"{chat.model()}: {_HELP}", style="dim", markup=False)
    while True:
        try:
            question = console.input("[bold]> [/]" if console.is_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if question == "/new":
            chat.forget()
        elif question:
            _answer(chat, question, console)


def _answer(chat: Chat, question: str, console: Console) -> None:
    pieces = chat.ask(question)
    try:
        for piece in pieces:
            console.out(piece, end="", highlight=False)
        console.out("")
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]  # closes the connection, which stops the work
        console.print(" (stopped)", style="dim")
    except ChatFailed as error:
        console.out("")
        if not console.is_terminal:
            raise
        console.print(str(error), style="red", markup=False)


def _delta(data: str) -> Iterator[str]:
    try:
        event = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ChatFailed(f"the gateway sent an event that is not JSON: {error}") from error
    if "error" in event:
        raise ChatFailed(_message(event))
    for choice in event.get("choices") or []:
        if text := (choice.get("delta") or {}).get("content"):
            yield text


def _reason(body: bytes, status_code: int) -> str:
    try:
        return f"{_message(msgspec.json.decode(body, type=dict[str, Any]))} (HTTP {status_code})"
    except msgspec.MsgspecError:
        return f"the gateway answered HTTP {status_code}"


def _message(event: dict[str, Any]) -> str:
    error = event.get("error")
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
