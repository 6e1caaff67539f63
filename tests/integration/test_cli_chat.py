"""`headrace chat` against a real gateway process on a real NATS server, with a worker that answers what tests say."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.cli.chat import Chat
from services.cli.errors import ChatFailed
from services.cli.status_report import gather
from services.cli.supervisor import ProcessInfo
from shared.models import ChatTokenizer
from shared.protocol.records import ErrorInfo
from tests.conftest import free_port
from tests.integration.gateway_harness import GatewayProcess, Worker, fresh_seed, make_model

HEADRACE = Path(sys.executable).parent / "headrace"


class Scene:
    """A gateway, its worker, and the tokenizer that turns prompts back into text."""

    def __init__(self, gateway: GatewayProcess, worker: Worker, model: Path) -> None:
        self.gateway = gateway
        self.worker = worker
        self._tokenizer = ChatTokenizer.load(model)

    def chat(self, *, url: str = "", model: str = "", system: str = "", **options: object) -> Chat:
        return Chat(url or self.gateway.url, model, system=system, options=options, api_key="")

    def prompts(self) -> list[str]:
        return [self._tokenizer.decode(request.prompt_ids) for request in self.worker.seen]


@pytest.fixture(scope="module")
async def scene(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    directory = tmp_path_factory.mktemp("chat")
    model = make_model(directory / "chat-model")
    gateway = GatewayProcess(nats_url, model, directory)
    await asyncio.to_thread(gateway.start)
    async with Worker.running(nats_url, "chat-model") as worker:
        yield Scene(gateway, worker, model)
    gateway.stop()


async def ask(chat: Chat, question: str) -> list[str]:
    return await asyncio.to_thread(lambda: list(chat.ask(question)))


async def test_answers_come_in_pieces_and_the_next_question_carries_the_conversation(scene: Scene) -> None:
    chat = scene.chat(system="be brief")
    assert await ask(chat, "hi") == ["Hello", ",", " wörld", "!"]
    await ask(chat, "again")
    assert scene.prompts()[-1] == "s:be brief\nu:hi\na:Hello, wörld!\nu:again\na:"
    chat.forget()
    await ask(chat, "anew")
    assert scene.prompts()[-1] == "s:be brief\nu:anew\na:"


async def test_what_the_gateway_refuses_is_said_in_its_words_and_forgotten(scene: Scene) -> None:
    chat = scene.chat(model="another")
    with pytest.raises(ChatFailed, match=r"another.*HTTP 404"):
        await ask(chat, "hi")
    assert chat.history == []


async def test_an_error_inside_a_stream_is_an_error_and_what_came_before_is_kept(scene: Scene) -> None:
    seed = fresh_seed()
    chat = scene.chat(seed=seed)
    received: list[str] = []

    def listen() -> None:
        for piece in chat.ask("hi"):
            received.append(piece)

    scene.worker.reserve(seed)
    listening = asyncio.create_task(asyncio.to_thread(listen))
    work = await scene.worker.take(seed)
    await work.claim()
    await work.say("half")
    await work.end("error", ErrorInfo(message="the worker lost its mind"))
    with pytest.raises(ChatFailed, match="lost its mind"):
        await listening
    assert received == ["half"]
    assert chat.history[-1] == {"role": "assistant", "content": "half"}


async def test_without_a_gateway_the_command_is_one_line(scene: Scene) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [HEADRACE, "chat", "--url", f"http://127.0.0.1:{free_port()}"],
        check=False,
        input="hi\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr


async def test_the_command_answers_each_line_that_is_piped_into_it(scene: Scene) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [HEADRACE, "chat", "--url", scene.gateway.url],
        check=False,
        input="one\ntwo\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "Hello, wörld!\nHello, wörld!\n")


async def test_status_without_nats_still_shows_the_processes_and_says_why_it_knows_no_more(tmp_path: Path) -> None:
    processes = {"decode-0": ProcessInfo("decode-0", "RUNNING", 1, 1, 0, 0, "")}
    report = await gather(f"nats://user:secret@127.0.0.1:{free_port()}", None, processes, 7, tmp_path)
    assert "no NATS server answers" in report.problem
    assert [row.name for row in report.rows] == ["decode-0"]
    assert "secret" not in report.nats_url + report.problem
