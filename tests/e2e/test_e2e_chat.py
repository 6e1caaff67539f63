"""The whole pipeline with the real model and the real openai client."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest

from shared.bus import Bus, LogState
from shared.protocol.records import Claimed, Ended
from shared.protocol.subjects import encode_token
from tests.conftest import free_port
from tests.e2e.conftest import MODEL, Stack

ROOT = Path(__file__).resolve().parents[2]
QUESTION = [{"role": "user", "content": "Name three rivers of Europe and say one sentence about each."}]


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=120)


def log_of(stack: Stack, request_id: str) -> LogState:
    async def read() -> LogState:
        async with await Bus.connect(stack.nats_url, name="test") as bus:
            return await bus.open_log("default", request_id).state()

    return asyncio.run(read())


def claims_of(stack: Stack, request_id: str) -> list[str]:
    return [claim.stage for claim in log_of(stack, request_id).claims]


def test_a_chat_streams_text_and_ends_with_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            max_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert len(text.split()) > 10
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 40
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=40, temperature=0)
    assert whole.choices[0].message.content == text
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == chunks[-1].usage.prompt_tokens


def test_completions_answer_streamed_and_whole_alike(client: openai.OpenAI) -> None:
    prompt = "Once upon a time there was a river that"
    whole = client.completions.create(model=MODEL, prompt=prompt, max_tokens=24, temperature=0)
    parts = client.completions.create(model=MODEL, prompt=prompt, max_tokens=24, temperature=0, stream=True)
    assert whole.choices[0].text == "".join(part.choices[0].text for part in parts if part.choices)
    assert len(whole.choices[0].text) > 20


async def test_many_clients_at_once_get_what_each_gets_alone(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=180) as many:

        async def ask(number: int) -> str | None:
            answer = await many.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": f"Count from {number} to {number + 5} and explain numbers."}],
                max_tokens=24,
                temperature=0.8,
                seed=number,
            )
            return answer.choices[0].message.content

        together = await asyncio.gather(*(ask(number) for number in range(8)))
        for number in (0, 3, 7):
            assert await ask(number) == together[number]


def test_a_seed_repeats_a_sampled_answer_and_another_changes_it(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str | None:
        answer = client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=24, temperature=1.0, top_p=0.95, seed=seed
        )
        return answer.choices[0].message.content

    assert ask(1) == ask(1)
    assert ask(1) != ask(2)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_speculation_never_changes_the_output(stack: Stack, client: openai.OpenAI, temperature: float) -> None:
    text = "The miller opens the headrace, and the water turns the wheel. " * 6
    messages = [{"role": "user", "content": f"Repeat this text word for word: {text}"}]

    def ask(speculation: str) -> tuple[list[int], int]:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=64,
            temperature=temperature,
            seed=5,
            extra_body={"speculation": speculation},
        )
        state = log_of(stack, answer.id)
        assert state.ended is not None
        return state.output_ids, state.ended.usage.drafted_tokens

    plain, none_drafted = ask("off")
    speculated, drafted = ask("auto")
    assert plain == speculated
    assert none_drafted == 0
    assert drafted > 0


def test_a_stop_string_ends_the_text_and_is_not_part_of_it(client: openai.OpenAI) -> None:
    free = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=60, temperature=0)
    text = free.choices[0].message.content or ""
    stop = text[30:38]
    cut = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=60, temperature=0, stop=[stop])
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_the_second_request_with_the_same_long_prompt_skips_the_cached_part(client: openai.OpenAI) -> None:
    system = f"[{time.time_ns()}] " + "You are the keeper of a water mill and answer briefly. " * 30

    def ask(question: str) -> tuple[int, int, str | None]:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "system", "content": system}, {"role": "user", "content": question}],
            max_tokens=12,
            temperature=0,
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached = answer.usage.prompt_tokens_details.cached_tokens or 0
        return cached, answer.usage.prompt_tokens, answer.choices[0].message.content

    cold, _, first = ask("What is a sluice?")
    warm, prompt_tokens, second = ask("What is a weir?")
    again, _, third = ask("What is a sluice?")
    assert cold == 0
    assert prompt_tokens - 64 < warm < prompt_tokens
    assert again > 0
    assert first == third
    assert second


def test_kill_9_of_decode_in_mid_stream_loses_and_changes_nothing(stack: Stack, client: openai.OpenAI) -> None:
    arguments = {"model": MODEL, "messages": QUESTION, "max_tokens": 200, "temperature": 0.7, "seed": 11}
    arguments["extra_body"] = {"min_tokens": 200}
    undisturbed = client.chat.completions.create(**arguments)  # type: ignore[call-overload]
    text, request_id, killed, victim = "", "", False, stack.pid_of("decode-0")
    for chunk in client.chat.completions.create(**arguments, stream=True):  # type: ignore[call-overload]
        request_id = chunk.id
        text += chunk.choices[0].delta.content or ""
        if not killed and len(text) > 60:
            stack.kill_9(victim)
            killed = True
    assert killed
    assert text == undisturbed.choices[0].message.content
    assert log_of(stack, request_id).output_ids == log_of(stack, undisturbed.id).output_ids
    assert claims_of(stack, request_id) == ["prefill", "decode", "decode"]
    stack.wait_ready()
    stack.wait_until_idle()


def test_kill_9_of_prefill_in_mid_prompt_loses_nothing(stack: Stack, client: openai.OpenAI) -> None:
    long = "The miller opens the headrace and counts the sacks of grain that came by cart this morning. " * 100
    arguments = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"[{time.time_ns()}] Summarise: {long}"}],
        "max_tokens": 16,
        "temperature": 0,
    }
    victim = stack.pid_of("prefill-0")
    stream = client.chat.completions.create(**arguments, stream=True)  # type: ignore[call-overload]
    request_id = next(iter(stream)).id
    while not log_of(stack, request_id).claims:
        time.sleep(0.05)
    stack.kill_9(victim)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert claims_of(stack, request_id) == ["prefill", "prefill", "decode"]
    again = client.chat.completions.create(**arguments)  # type: ignore[call-overload]
    assert again.choices[0].message.content == text
    stack.wait_ready()
    stack.wait_until_idle()


def test_a_client_that_goes_away_stops_the_work(stack: Stack, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=1500, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    request_id = ""
    for number, chunk in enumerate(stream):
        request_id = chunk.id
        if number == 5:
            break
    stream.close()
    give_up = time.monotonic() + 20
    while (ended := log_of(stack, request_id).ended) is None and time.monotonic() < give_up:
        time.sleep(0.1)
    assert ended is not None
    assert ended.reason == "cancelled"
    stack.wait_until_idle()
    assert log_of(stack, request_id).ended == ended


def test_a_request_accepted_by_one_gateway_is_followed_through_another(stack: Stack, client: openai.OpenAI) -> None:
    port = free_port()
    second = subprocess.Popen(
        [sys.executable, "-m", "services.gateway"],
        cwd=ROOT,
        env={
            **stack.env,
            "HEADRACE_PORT": str(port),
            "HEADRACE_NATS_URL": stack.nats_url,
            "HEADRACE_INSTANCE": "gateway-9",
        },
        stdout=subprocess.DEVNULL,
    )
    try:
        other = f"http://127.0.0.1:{port}"
        give_up = time.monotonic() + 60
        while time.monotonic() < give_up:
            try:
                if httpx.get(f"{other}/readyz", timeout=2).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=16, temperature=0)
        seen = httpx.get(f"{other}/v1/chat/completions/{answer.id}", timeout=10).json()
        assert seen["choices"][0]["message"]["content"] == answer.choices[0].message.content
    finally:
        second.terminate()
        second.wait(timeout=30)


def test_a_stage_that_is_down_is_waited_for_and_named(stack: Stack) -> None:
    stack.headrace("scale", "decode=0")
    try:
        answer = httpx.post(
            f"{stack.url}/v1/chat/completions",
            json={"model": MODEL, "messages": QUESTION, "max_tokens": 8},
            headers={"x-headrace-timeout-s": "6"},
            timeout=60,
        )
        assert answer.status_code == 503
        assert "decode" in answer.json()["error"]["message"]
        waiting = httpx.Client(timeout=120)
        with waiting.stream(
            "POST",
            f"{stack.url}/v1/chat/completions",
            json={"model": MODEL, "messages": QUESTION, "max_tokens": 8, "stream": True},
        ) as stream:
            assert stream.status_code == 200
            stack.headrace("scale", "decode=1")
            assert "[DONE]" in "".join(stream.iter_text())
    finally:
        stack.headrace("scale", "decode=1")
        stack.wait_ready()


def test_a_restarted_worker_serves_when_the_command_returns(stack: Stack) -> None:
    """Else a rolling restart would stop the next instance while this one still loads its model."""
    (before,) = stack.instances("decode")
    stack.headrace("restart", "decode")
    (after,) = stack.instances("decode")
    assert after["pid"] != before["pid"]
    assert after["state"] == "ready"


def test_messages_that_nobody_can_read_end_no_worker(stack: Stack, client: openai.OpenAI) -> None:
    before = [entry["pid"] for stage in ("prefill", "decode") for entry in stack.instances(stage)]

    async def poison() -> int:
        async with await Bus.connect(stack.nats_url, name="test") as bus:
            for stream in ("req", "job"):
                await bus.js.publish(f"hr.{stream}.{encode_token(MODEL)}.high.t.{time.time_ns()}", b"\xc1nonsense")
            give_up = time.monotonic() + 20
            while time.monotonic() < give_up:
                info = await bus.js.stream_info("HR_DEAD")
                if info.state.messages >= 2:
                    return info.state.messages
                await asyncio.sleep(0.1)
        return 0

    assert asyncio.run(poison()) == 2
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=4)
    assert answer.choices[0].finish_reason == "length"
    assert [entry["pid"] for stage in ("prefill", "decode") for entry in stack.instances(stage)] == before


def test_nats_clients_need_nothing_of_ours(stack: Stack) -> None:
    output = subprocess.run(
        [
            sys.executable,
            ROOT / "examples" / "nats_client.py",
            "--nats",
            stack.nats_url,
            "--max-tokens",
            "12",
            "What is a mill?",
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert output.returncode == 0, output.stderr
    assert len(output.stdout.split()) > 5


def test_every_log_closes_with_exactly_one_terminal_record(stack: Stack, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=5, temperature=0)

    async def read() -> list[str]:
        async with await Bus.connect(stack.nats_url, name="test") as bus:
            entries = await bus.open_log("default", answer.id).read()
        assert [e.seq for e in entries] == sorted({e.seq for e in entries})
        ends = [e.record for e in entries if isinstance(e.record, Ended)]
        assert ends == [entries[-1].record]
        claims = [e.record.epoch for e in entries if isinstance(e.record, Claimed)]
        assert claims == sorted(set(claims))
        return [type(e.record).__name__ for e in entries]

    assert asyncio.run(read())[:4] == ["Accepted", "Claimed", "Tokens", "Claimed"]
