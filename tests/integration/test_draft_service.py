"""The drafter as a process: what decode sends it and what comes back, over a real NATS server."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from shared.bus import Bus
from shared.engine import Engine, EngineConfig
from shared.models import ChatTokenizer, resolve_model
from shared.protocol.drafts import DraftContext, Proposal, decode_proposal, encode_draft
from shared.protocol.jobs import SamplingParams
from shared.protocol.subjects import draft_subject

MODEL = "smollm2-135m-instruct"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def drafter(nats_url: str) -> Iterator[str]:
    """A drafter whose draft model is the target itself, so that every guess can be foretold."""
    process = subprocess.Popen(
        [sys.executable, "-m", "services.draft"],
        cwd=ROOT,
        env={
            **os.environ,
            "HEADRACE_NATS_URL": nats_url,
            "HEADRACE_INSTANCE": "draft-7",
            "HEADRACE_DRAFT_MODEL": MODEL,
            "HEADRACE_MAX_SEQUENCES": "3",
        },
        stdout=subprocess.DEVNULL,
    )
    yield "draft-7"
    process.terminate()
    assert process.wait(timeout=30) == 0


@pytest.fixture
def forgetful(nats_url: str) -> Iterator[str]:
    """A drafter without a model that drops silent sequences soon."""
    process = subprocess.Popen(
        [sys.executable, "-m", "services.draft"],
        cwd=ROOT,
        env={
            **os.environ,
            "HEADRACE_NATS_URL": nats_url,
            "HEADRACE_INSTANCE": "draft-8",
            "HEADRACE_FORGET_AFTER_S": "2",
        },
        stdout=subprocess.DEVNULL,
    )
    yield "draft-8"
    process.terminate()
    assert process.wait(timeout=30) == 0


class Decode:
    """Speaks for a decode worker."""

    def __init__(self, bus: Bus, drafter: str) -> None:
        self._bus = bus
        self._subject = draft_subject(MODEL, drafter)
        self.inbox = bus.client.new_inbox()
        self._answers: asyncio.Queue[Proposal] = asyncio.Queue()

    async def open(self) -> None:
        async def collect(message: object) -> None:
            self._answers.put_nowait(decode_proposal(message.data))  # type: ignore[attr-defined]

        await self._bus.client.subscribe(self.inbox, cb=collect)

    async def send(self, context: DraftContext) -> None:
        await self._bus.client.publish(self._subject, encode_draft(context))

    async def ask(self, context: DraftContext) -> Proposal:
        await self.send(context)
        async with asyncio.timeout(30):
            return await self._answers.get()


@pytest.fixture
async def decode(nats_url: str, drafter: str) -> AsyncIterator[Decode]:
    async with await Bus.connect(nats_url, name="test") as bus:
        async with asyncio.timeout(90):
            while not any(s.instance == drafter and s.state == "ready" for s in bus.statuses.live("draft")):
                await asyncio.sleep(0.1)
        speaker = Decode(bus, drafter)
        await speaker.open()
        yield speaker


@pytest.fixture(scope="module")
def engine() -> Engine:
    files = resolve_model(MODEL)
    return Engine.load(
        EngineConfig(
            model_path=files.path, model_name=files.name, fingerprint=files.fingerprint, kv_memory_bytes=256 << 20
        )
    )


def tokens_of(text: str) -> list[int]:
    return ChatTokenizer.load(resolve_model(MODEL).path).encode(text)


def continuation(engine: Engine, ids: list[int], params: SamplingParams) -> list[int]:
    """What the model itself says next."""
    sequence = engine.new_sequence("target", ids, len(ids), params, speculate=False)
    engine.start(sequence)
    while sequence.finish_reason is None:
        engine.step()
    engine.release("target")
    return sequence.output_ids


async def test_repeated_text_is_proposed_by_lookup(decode: Decode) -> None:
    proposal = await decode.ask(DraftContext("lookup", "t", 0, [5, 6, 7, 8, 9, 5, 6], decode.inbox, max_tokens=3))
    assert (proposal.start, proposal.token_ids, proposal.proposer) == (7, [7, 8, 9], "prompt_lookup")
    grown = await decode.ask(DraftContext("lookup", "t", 7, [7], decode.inbox, max_tokens=2))
    assert (grown.start, grown.token_ids) == (8, [8, 9])


async def test_a_gap_in_what_it_knows_makes_it_ask_for_everything(decode: Decode) -> None:
    answer = await decode.ask(DraftContext("gap", "t", 40, [1, 2], decode.inbox))
    assert answer.resend


async def test_what_is_forgotten_must_be_sent_again(decode: Decode) -> None:
    await decode.ask(DraftContext("gone", "t", 0, [5, 6, 7, 5, 6], decode.inbox))
    await decode.send(DraftContext("gone", "t", 0, [], decode.inbox, forget=True))
    assert (await decode.ask(DraftContext("gone", "t", 5, [7], decode.inbox))).resend


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_the_draft_model_guesses_with_the_targets_own_noise(
    decode: Decode, engine: Engine, temperature: float
) -> None:
    ids = tokens_of("The capital of France is Paris, and its river is")
    expected = continuation(
        engine, ids, SamplingParams(max_tokens=8, seed=3, temperature=temperature, top_p=0.9, ignore_eos=True)
    )
    name = f"coupled-{temperature}"
    ask = DraftContext(name, "t", 0, ids, decode.inbox, max_tokens=5, seed=3, temperature=temperature, top_p=0.9)
    proposal = await decode.ask(ask)
    assert (proposal.start, proposal.token_ids, proposal.proposer) == (len(ids), expected[:5], "draft_model")
    # Two of the guesses were confirmed: the cache of the common part is kept and the rest is guessed anew.
    more = DraftContext(
        name, "t", len(ids), expected[:2], decode.inbox, max_tokens=5, seed=3, temperature=temperature, top_p=0.9
    )
    proposal = await decode.ask(more)
    assert (proposal.start, proposal.token_ids) == (len(ids) + 2, expected[2:7])


async def test_a_sequence_that_nobody_asks_about_is_forgotten(nats_url: str, forgetful: str) -> None:
    """A decode worker that was killed never says that its sequences ended."""
    async with await Bus.connect(nats_url, name="test") as bus, asyncio.timeout(60):

        def running() -> list[int]:
            return [s.running for s in bus.statuses.live("draft") if s.instance == forgetful and s.state == "ready"]

        while running() != [0]:
            await asyncio.sleep(0.1)
        speaker = Decode(bus, forgetful)
        await speaker.open()
        await speaker.ask(DraftContext("orphan", "t", 0, [5, 6, 7, 5, 6], speaker.inbox))
        while running() != [1]:
            await asyncio.sleep(0.1)
        while running() != [0]:
            await asyncio.sleep(0.1)


async def test_more_sequences_than_it_remembers_cost_a_resend_only(decode: Decode) -> None:
    for number in range(5):
        await decode.ask(DraftContext(f"many-{number}", "t", 0, [5, 6, 7, 8, 5, 6], decode.inbox))
    assert (await decode.ask(DraftContext("many-0", "t", 6, [7], decode.inbox))).resend
    assert not (await decode.ask(DraftContext("many-4", "t", 6, [7], decode.inbox))).resend
