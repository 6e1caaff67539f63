"""The drafter as a process: what decode sends it and what comes back, over a real NATS server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio

from services.draft.known import SOON
from shared.bus import Bus
from shared.engine import Engine
from shared.protocol.drafts import DRAFT_MODEL, DraftContext, decode_proposals, encode_draft
from shared.protocol.jobs import SamplingParams
from shared.protocol.status import STATUS_INTERVAL_S, InstanceStatus
from shared.protocol.subjects import draft_subject, proposal_subject
from shared.speculation import PROMPT_LOOKUP, SUFFIX_TREE
from tests.integration.kv_harness import eventually
from tests.unit.engine_harness import begin, drain, greedy, load, outputs, sampled, tiny_model

ROOT = Path(__file__).resolve().parents[2]
WANTED = 8
LENGTH = 60
RULED: dict[str, Any] = {
    "presence_penalty": 0.7,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.3,
    "logit_bias": {3: 4.0, 17: -100.0, 40: 2.5},
    "min_tokens": 30,
    "ignore_eos": False,
}


class Drafter:
    """A drafter process of the tiny model."""

    def __init__(self, nats_url: str, target: Path, name: str, draft: Path | str = "", **settings: str) -> None:
        self.name = name
        self._environment = {
            **os.environ,
            "HEADRACE_NATS_URL": nats_url,
            "HEADRACE_MODEL": str(target),
            "HEADRACE_DRAFT_MODEL": str(draft),
            "HEADRACE_INSTANCE": name,
            "HEADRACE_DTYPE": "fp32",
            "HEADRACE_BLOCK_TOKENS": "16",
            "HEADRACE_KV_MEMORY_GIB": "0.01",
            **{f"HEADRACE_{key.upper()}": value for key, value in settings.items()},
        }
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "services.draft"],
            cwd=ROOT,
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def restart(self) -> None:
        self.process = self._start()

    def ended(self, within_s: float = 90) -> tuple[int, str]:
        _, complaint = self.process.communicate(timeout=within_s)
        return self.process.returncode, complaint.decode()


@contextmanager
def running(drafter: Drafter) -> Iterator[Drafter]:
    """Stopped at the end, which must go well."""
    try:
        yield drafter
    finally:
        drafter.process.terminate()
    assert drafter.ended(30)[0] == 0


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the same tokens, and a shorter context."""
    return tiny_model(tmp_path_factory.mktemp("draft") / "smaller", num_hidden_layers=1, max_position_embeddings=128)


@pytest.fixture(scope="module")
def engine(target: Path) -> Engine:
    return load(target, max_draft_tokens=0)


@pytest.fixture(scope="module")
def twin(nats_url: str, target: Path) -> Iterator[Drafter]:
    """Its draft model is the target itself, so that every guess can be foretold."""
    with running(Drafter(nats_url, target, "draft-7", target)) as drafter:
        yield drafter


@pytest_asyncio.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    async with await Bus.connect(nats_url, name="test") as connected:
        yield connected


class Decode:
    """Speaks for a decode worker, and keeps of each proposer the newest guess for every position."""

    def __init__(self, bus: Bus, drafter: Drafter) -> None:
        self._bus = bus
        self._subject = draft_subject("tiny", drafter.name)
        self._drafter = drafter
        self.inbox = proposal_subject(f"test-{uuid4().hex}")
        self.messages = 0
        self.guesses: dict[str, dict[str, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
        """By request and proposer."""
        self.alternatives: dict[str, list[list[int]]] = {}
        """By request, the newest."""
        self.resend: set[str] = set()

    async def open(self) -> Decode:
        await self._bus.client.subscribe(self.inbox, cb=self._collect)
        await eventually(self._is_ready, within_s=90)
        return self

    async def _is_ready(self) -> bool:
        return any(status.state == "ready" for status in self._statuses())

    def _statuses(self) -> list[InstanceStatus]:
        """Of this run of the drafter: one, once it is known."""
        board = self._bus.statuses.live("draft")
        return [s for s in board if s.instance == self._drafter.name and s.pid == self._drafter.process.pid]

    async def later_status(self, after_s: float = 0.0) -> InstanceStatus:
        """One that the drafter sends so much later than what decode has sent until now came to the server."""
        await self._bus.client.flush()
        sent_unix_s = time.time()

        async def told() -> bool:
            return any(status.sent_unix_s > sent_unix_s + after_s for status in self._statuses())

        await eventually(told, within_s=30 + after_s)
        return self._statuses()[0]

    async def _collect(self, message: Any) -> None:
        self.messages += 1
        for proposal in decode_proposals(message.data).items:
            if proposal.resend:
                self.resend.add(proposal.request_id)
            else:
                guesses = self.guesses[proposal.request_id][proposal.proposer]
                guesses.update(enumerate(proposal.token_ids, proposal.start))
                assert len(proposal.confidence) == len(proposal.token_ids)
                assert [*map(len, proposal.alternative_confidence)] == [*map(len, proposal.alternatives)]
                if proposal.alternatives:
                    self.alternatives[proposal.request_id] = proposal.alternatives

    async def send(self, context: DraftContext) -> None:
        await self._bus.client.publish(self._subject, encode_draft(context))

    async def begin(
        self, name: str, prompt: list[int], params: SamplingParams, wanted: int = WANTED, tenant: str = "t"
    ) -> None:
        await self.send(DraftContext(name, tenant, 0, prompt, self.inbox, wanted, len(prompt), params, "salt"))

    async def grow(self, name: str, start: int, token_ids: list[int], wanted: int = WANTED) -> None:
        await self.send(DraftContext(name, "t", start, token_ids, self.inbox, wanted))

    async def forget(self, name: str) -> None:
        await self.send(DraftContext(name, "t", 0, [], self.inbox, forget=True))

    async def until_guessed(self, name: str, start: int, token_ids: list[int]) -> None:
        """Until somebody's guess is these tokens from `start` on; fails when nobody's is."""

        def told() -> list[list[int | None]]:
            return [[ids.get(start + n) for n in range(len(token_ids))] for ids in self.guesses[name].values()]

        async def guessed() -> bool:
            return token_ids in told()

        try:
            await eventually(guessed, within_s=30)
        except Exception as error:
            raise AssertionError(f"{name}: {told()} instead of {token_ids}") from error


def answer(engine: Engine, prompt: list[int], params: SamplingParams) -> list[int]:
    """What the target itself says."""
    begin(engine, "target", prompt, params, speculate=False)
    found = outputs(drain(engine))["target"]
    engine.release("target")
    return found


def strange(seed: int, length: int = 40) -> list[int]:
    """A prompt in which nothing stands twice, so that no lookup has an idea of it."""
    return [(seed + 7 * at) % 250 for at in range(length)]


async def serve(
    decode: Decode, name: str, prompt: list[int], said: list[int], params: SamplingParams, far: int = SOON
) -> None:
    """Decode a request that accepts all drafts, three at a time, where at least `far` are made."""
    await decode.begin(name, prompt, params, tenant=name)  # what others said is no help
    for done in range(0, len(said) - 1, 3):  # of a single token nothing is said
        await decode.until_guessed(name, len(prompt) + done, said[done : done + far])
        await decode.grow(name, len(prompt) + done, said[done : done + 3])
    await decode.forget(name)


@pytest.mark.parametrize(
    ("params", "far"),
    [
        (greedy(LENGTH), SOON),
        (sampled(LENGTH, seed=3, top_p=0.9, temperature=0.9), SOON),
        (greedy(LENGTH, **RULED), SOON),
        (sampled(LENGTH, seed=4, **RULED), SOON),
        (sampled(LENGTH, seed=3, temperature=0.01), WANTED),
    ],
    ids=["greedy", "sampled", "greedy-ruled", "sampled-ruled", "sure"],
)
async def test_the_draft_model_guesses_with_the_targets_own_noise_and_rules(
    bus: Bus, twin: Drafter, engine: Engine, params: SamplingParams, far: int, request: pytest.FixtureRequest
) -> None:
    """Of random weights the next tokens alone are likely enough, unless the temperature makes them sure."""
    prompt = strange(11)
    decode = await Decode(bus, twin).open()
    await serve(decode, request.node.name, prompt, answer(engine, prompt, params), params, far)
    assert DRAFT_MODEL in decode.guesses[request.node.name]


async def test_many_sequences_of_two_decode_workers_are_drafted_together(
    bus: Bus, twin: Drafter, engine: Engine
) -> None:
    first, second = await Decode(bus, twin).open(), await Decode(bus, twin).open()
    async with asyncio.TaskGroup() as tasks:
        for number in range(8):
            prompt, params = strange(number, 60), sampled(LENGTH, seed=number)
            said = answer(engine, prompt, params)
            decode = (first, second)[number % 2]
            tasks.create_task(serve(decode, f"together-{number}", prompt, said, params))
    for mine, others in ((first, second), (second, first)):
        assert len(mine.guesses) == 4
        assert not mine.guesses.keys() & others.guesses.keys()


async def test_a_wrong_guess_is_taken_back(bus: Bus, twin: Drafter, engine: Engine) -> None:
    prompt, params = strange(12), sampled(LENGTH, seed=5)
    said = answer(engine, prompt, params)
    other = [*said[:2], (said[2] + 1) % 250]
    goes_on = answer(engine, prompt + other, params)
    decode = await Decode(bus, twin).open()
    await decode.begin("wrong", prompt, params)
    await decode.until_guessed("wrong", len(prompt), said[:SOON])
    await decode.grow("wrong", len(prompt), other)
    await decode.until_guessed("wrong", len(prompt) + 3, goes_on[:SOON])


async def test_alternatives_are_told_and_gone_on_with_when_they_come_true(
    bus: Bus, twin: Drafter, engine: Engine
) -> None:
    prompt, params = strange(16), sampled(LENGTH, seed=9, top_p=1.0, top_k=4, temperature=2.0)
    decode = await Decode(bus, twin).open()
    await decode.begin("otherwise", prompt, params)
    text = list(prompt)
    for _ in range(3):

        async def told() -> bool:
            return "otherwise" in decode.alternatives

        await eventually(told, within_s=30)
        came = decode.alternatives.pop("otherwise")[-1]
        goes_on = answer(engine, [*text, came[0]], params)
        assert 2 <= len(came) <= 4
        assert came[1:] == goes_on[: len(came) - 1]
        await decode.grow("otherwise", len(text), came[:1])
        text.append(came[0])
        await decode.until_guessed("otherwise", len(text), goes_on[:SOON])


async def test_after_a_burst_of_contexts_the_newest_is_answered(bus: Bus, twin: Drafter, engine: Engine) -> None:
    prompt, params = strange(13), sampled(LENGTH, seed=6)
    said = answer(engine, prompt, params)
    decode = await Decode(bus, twin).open()
    await decode.begin("burst", prompt, params)
    for done in range(30):
        await decode.grow("burst", len(prompt) + done, [said[done]])
    await decode.until_guessed("burst", len(prompt) + 30, said[30 : 30 + SOON])


async def test_a_drafter_killed_in_mid_stream_is_told_again_and_goes_on(
    bus: Bus, nats_url: str, target: Path, engine: Engine
) -> None:
    prompt, params = strange(14), sampled(LENGTH, seed=7, **RULED)
    said = answer(engine, prompt, params)
    with running(Drafter(nats_url, target, "draft-9", target)) as drafter:
        decode = await Decode(bus, drafter).open()
        await decode.begin("killed", prompt, params)
        await decode.until_guessed("killed", len(prompt), said[:SOON])
        drafter.kill()
        drafter.restart()
        await decode.open()
        await decode.grow("killed", len(prompt), said[:20])

        async def asks_for_all() -> bool:
            return "killed" in decode.resend

        await eventually(asks_for_all, within_s=30)
        told = DraftContext(
            "killed", "t", 0, prompt + said[:20], decode.inbox, WANTED, num_prompt=len(prompt), params=params
        )
        await decode.send(told)
        await decode.until_guessed("killed", len(prompt) + 20, said[20 : 20 + SOON])


async def test_another_model_drafts_as_far_as_its_context_reaches(
    bus: Bus, nats_url: str, target: Path, smaller: Path
) -> None:
    params = sampled(400, seed=8)
    own = load(smaller, max_draft_tokens=0)
    with running(Drafter(nats_url, target, "draft-10", smaller)) as drafter:
        decode = await Decode(bus, drafter).open()
        prompt = strange(15)
        said = answer(own, prompt, params)
        await serve(decode, "own", prompt, said[: 128 - 40], params)
        long = [(n * n + n) % 251 for n in range(150)]
        await decode.begin("long", [*long, 9, 8, 7, 6, 5, 4, 9, 8, 7, 6], params)
        await decode.until_guessed("long", 160, [5, 4])
        assert decode.guesses["long"].keys() == {PROMPT_LOOKUP}


async def test_recent_outputs_of_a_tenant_are_proposed_to_that_tenant_only(bus: Bus, twin: Drafter) -> None:
    decode, params = await Decode(bus, twin).open(), greedy(LENGTH)
    question, said = [200, 3, 150, 7, 99, 12], [(5 + 11 * n) % 250 for n in range(30)]
    await decode.begin("asked", question, params, wanted=0)
    await decode.grow("asked", len(question), said, wanted=0)
    await decode.forget("asked")
    await decode.begin("again", question, params)
    # As far as it may guess behind a match of so many tokens.
    await decode.until_guessed("again", len(question), said[: len(question)])
    assert SUFFIX_TREE in decode.guesses["again"]
    await decode.begin("stranger", question, params, tenant="other")
    await decode.grow("stranger", len(question), said[:4])

    async def guessed() -> bool:
        return bool(decode.guesses["stranger"])

    await eventually(guessed, within_s=30)
    assert SUFFIX_TREE not in decode.guesses["stranger"]


async def test_repeated_text_is_proposed_by_lookup(bus: Bus, twin: Drafter) -> None:
    decode = await Decode(bus, twin).open()
    await decode.begin("lookup", [5, 6, 7, 8, 9, 5, 6], greedy(LENGTH))
    await decode.until_guessed("lookup", 7, [7, 8, 9])
    await decode.grow("lookup", 7, [7, 8])
    await decode.until_guessed("lookup", 9, [9, 5, 6])
    assert PROMPT_LOOKUP in decode.guesses["lookup"]


async def test_a_gap_in_what_it_knows_makes_it_ask_for_everything(bus: Bus, twin: Drafter) -> None:
    decode = await Decode(bus, twin).open()

    async def asked(*names: str) -> bool:
        return decode.resend == set(names)

    await decode.grow("gap", 40, [1, 2])
    await eventually(lambda: asked("gap"), within_s=30)
    await decode.begin("gone", strange(1), greedy(LENGTH))
    await decode.forget("gone")
    await decode.grow("gone", 40, [1])
    await decode.grow("unwanted", 40, [1], wanted=0)
    await eventually(lambda: asked("gap", "gone"), within_s=30)


async def test_what_cannot_be_read_is_dropped(bus: Bus, twin: Drafter) -> None:
    decode = await Decode(bus, twin).open()
    subject = draft_subject("tiny", twin.name)
    for junk in (b"", b"\xff" * 40, encode_draft(DraftContext("r", "t", 0, [1], "inbox"))[:-3]):
        await bus.client.publish(subject, junk)
    await decode.begin("after-junk", [5, 6, 7, 8, 9, 5, 6], greedy(LENGTH))
    await decode.until_guessed("after-junk", 7, [7, 8, 9])


async def test_silent_sequences_are_forgotten(bus: Bus, nats_url: str, target: Path) -> None:
    """A decode worker that was killed never says that its sequences ended."""
    drafter = Drafter(nats_url, target, "draft-8", forget_after_s="2")
    with running(drafter):
        decode = await Decode(bus, drafter).open()
        await decode.begin("silent", [5, 6, 7, 8, 9, 5, 6], greedy(LENGTH))
        await decode.until_guessed("silent", 7, [7, 8, 9])

        async def forgotten() -> bool:
            return (await decode.later_status()).running == 0

        await eventually(forgotten, within_s=60)


async def test_speculation_off_is_a_drafter_that_says_nothing(bus: Bus, nats_url: str, target: Path) -> None:
    drafter = Drafter(nats_url, target, "draft-11", target, speculation="off")
    with running(drafter):
        decode = await Decode(bus, drafter).open()
        await decode.begin("off", [5, 6, 7, 8, 9, 5, 6], greedy(LENGTH))
        await decode.grow("gap", 100, [1])
        status = await decode.later_status(after_s=2 * STATUS_INTERVAL_S)
        assert status.running == 0
        assert status.details == {"speculation": "off"}
        assert decode.messages == 0


def test_a_draft_model_of_other_tokens_is_refused(nats_url: str, target: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other")
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokenizer.replace("<|end|>", "<|fin|>"))
    status, complaint = Drafter(nats_url, target, "draft-12", other).ended()
    assert status == 1
    assert "has another vocabulary than tiny" in complaint
    assert "Traceback" not in complaint


def test_a_draft_model_that_ends_texts_with_other_tokens_is_refused(
    nats_url: str, target: Path, tmp_path: Path
) -> None:
    other = tiny_model(tmp_path / "other")
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1]}))
    status, complaint = Drafter(nats_url, target, "draft-13", other).ended()
    assert status == 1
    assert "draft model other ends a text with tokens [0, 1" in complaint
    assert "Traceback" not in complaint
