"""An engine whose every token is known beforehand, under the real `EngineHost`, and a KV plane that may forget.

It keeps the books that workers rely on (sequences, blocks, chunks, several tokens a step) and computes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from shared.blocks import BlockKey
from shared.engine import EngineError, OutOfBlocks, SequenceStep, StepStats, UnknownSequence
from shared.engine import Sequence as EngineSequence
from shared.protocol.blocks import BlockRef, KVLayout, Place
from shared.protocol.jobs import SamplingParams
from tests.simulation.world import Process, World

BLOCK_TOKENS = 8
CHUNK_TOKENS = 8
CONTEXT = 256
END_TOKEN = 1
TICK_S = 0.5

LAYOUT = KVLayout("sim", "0", "float32", 1, 1, 1, BLOCK_TOKENS, "", "sim")


def token_at(seed: int, position: int) -> int:
    """Output token `position` of a request: a fixed function, as sampling is with counter-based noise."""
    if position == seed % 17 + 3:
        return END_TOKEN
    return 2 + (seed * 1_000_003 + position * 7_919) % 9_973


def output_of(seed: int, max_tokens: int) -> tuple[list[int], str]:
    """The whole output of an undisturbed run, and why it ends."""
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        tokens.append(token_at(seed, len(tokens)))
        if tokens[-1] == END_TOKEN:
            return tokens, "stop"
    return tokens, "length"


def text_of(tokens: Sequence[int]) -> str:
    return "".join(f"{token} " for token in tokens)


@dataclass(frozen=True)
class Poison:
    """Where a request crashes the worker: in `prefill`, or in `decode` when it would write output token `position`."""

    stage: str
    position: int = 0


@dataclass
class Pool:
    num_blocks: int = 64
    num_used: int = 0
    num_idle: int = 0


class ScriptedEngine:
    """What `EngineHost` asks of an engine."""

    def __init__(self, process: Process, stage: str, poison: dict[str, Poison]) -> None:
        self.layout = LAYOUT
        self.context_length = CONTEXT
        self.config = SimpleNamespace(block_tokens=BLOCK_TOKENS)
        self.pool = Pool()
        self.prefix_queries = self.prefix_hits = 0
        self.fail_next = False
        """The next step raises."""
        self._process = process
        self._random = process.world.random
        self._stage = stage
        self._poison = poison
        self._sequences: dict[str, EngineSequence] = {}
        self._ids = 0

    @property
    def open_sequences(self) -> list[str]:
        return list(self._sequences)

    @property
    def has_work(self) -> bool:
        return any(sequence.state == "running" for sequence in self._sequences.values())

    def new_sequence(
        self,
        seq_id: str,
        token_ids: list[int],
        num_prompt: int,
        params: SamplingParams,
        *,
        prefill_only: bool = False,
        speculate: bool = True,
        pause_after: int | None = None,
        text: bool = True,
        salt: str = "",
        ahead: bool = False,  # this engine steps all that run
    ) -> EngineSequence:
        if seq_id in self._sequences:
            raise EngineError(f"sequence {seq_id} exists already; release it first")
        sequence = EngineSequence(
            seq_id=seq_id,
            token_ids=list(token_ids),
            num_prompt=num_prompt,
            params=params,
            max_length=num_prompt + params.max_tokens,
            speculate=speculate,
            pause_after=1 if prefill_only else pause_after,
            detokenizer=None,
            arrival=self._ids,
            salt=salt,
        )
        known = sequence.output_ids
        if known and known[-1] == END_TOKEN:
            sequence.finish_reason = "stop"
        elif len(known) >= params.max_tokens:
            sequence.finish_reason = "length"
        self._sequences[seq_id] = sequence
        return sequence

    def admit(self, sequence: EngineSequence) -> None:
        if sequence.seq_id not in self._sequences:
            raise UnknownSequence(sequence.seq_id)
        needed = -(-sequence.max_length // BLOCK_TOKENS)
        if self.pool.num_used + needed > self.pool.num_blocks:
            raise OutOfBlocks(sequence.seq_id)
        self.pool.num_used += needed
        sequence.block_ids = list(range(self._ids, self._ids + needed))
        self._ids += needed
        sequence.state = "admitted"

    def set_loaded(self, sequence: EngineSequence, num_tokens: int) -> None:
        sequence.num_computed = num_tokens

    def start(self, sequence: EngineSequence) -> None:
        if sequence.seq_id in self._sequences:
            sequence.state = "running"

    def pause(self, seq_id: str) -> None:
        sequence = self._sequences.get(seq_id)
        if sequence is not None and sequence.state == "running":
            sequence.state = "paused"

    def unpin(self, seq_id: str) -> None:
        sequence = self._sequences.get(seq_id)
        if sequence is not None:
            sequence.pins = max(0, sequence.pins - 1)

    def pin(self, seq_id: str) -> list[int]:
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            raise UnknownSequence(seq_id)
        sequence.pins += 1
        return sequence.block_ids[: sequence.num_computed // BLOCK_TOKENS]

    def propose(self, seq_id: str, start: int, token_ids: list[int]) -> None:
        pass

    def release(self, seq_id: str) -> None:
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            self.pool.num_used -= len(sequence.block_ids)
            sequence.block_ids = []
            sequence.state = "released"

    def block_buffer(self, block_id: int) -> bytearray:
        return bytearray(LAYOUT.block_bytes)

    def step(self) -> list[SequenceStep]:
        """One chunk or some tokens for each running sequence."""
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the step failed, as it was told to")
        running = [sequence for sequence in self._sequences.values() if sequence.state == "running"]
        for sequence in running:
            poison = self._poison.get(sequence.seq_id)
            if (
                poison is not None
                and poison.stage == self._stage
                and (poison.stage == "prefill" or len(sequence.output_ids) >= poison.position)
            ):
                self._process.kill(f"crashed by {sequence.seq_id}")
                return []
        return [self._advance(sequence) for sequence in running]

    def _advance(self, sequence: EngineSequence) -> SequenceStep:
        first = len(sequence.output_ids)
        if sequence.num_pending > CHUNK_TOKENS:
            sequence.num_computed += CHUNK_TOKENS
            return SequenceStep(sequence.seq_id, first, [], "", sequence.num_computed, None, 0, 0)
        most = 1 if sequence.pause_after is not None else self._random.choice((1, 1, 1, 2, 3))
        if (poison := self._poison.get(sequence.seq_id)) is not None and poison.stage == self._stage:
            most = min(most, poison.position - first)
        new: list[int] = []
        while len(new) < most and sequence.finish_reason is None:
            sequence.num_computed = len(sequence.token_ids)
            token = token_at(sequence.params.seed, first + len(new))
            new.append(token)
            sequence.token_ids.append(token)
            if token == END_TOKEN:
                sequence.finish_reason = "stop"
            elif len(sequence.output_ids) >= sequence.params.max_tokens:
                sequence.finish_reason = "length"
        if sequence.finish_reason is not None:
            sequence.state = "finished"
        elif sequence.pause_after is not None:
            sequence.state = "paused"
        drafted = len(new) - 1
        return SequenceStep(
            sequence.seq_id, first, new, text_of(new), sequence.num_computed, sequence.finish_reason, drafted, drafted
        )


class SimAsyncEngine:
    """`AsyncEngine` without its thread: turns of the process's event loop, of which the real one knows as little."""

    def __init__(
        self,
        engine: ScriptedEngine,
        *,
        on_steps: Callable[[list[SequenceStep], StepStats], None],
        on_failure: Callable[[list[str], BaseException], None],
    ) -> None:
        self.engine = engine
        self.progress_unix_s = time.time()
        self.fault = ""
        self.hangs = False
        self.step_s = 0.01
        self._on_steps = on_steps
        self._on_failure = on_failure
        self._inbox: deque[Callable[[], None]] = deque()
        self._loop = asyncio.get_running_loop()
        self._stopped = False
        self._in_step = False
        self._next_turn: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._want_turn(0.0)

    async def stop(self) -> None:
        self._stopped = True

    async def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        future: asyncio.Future[Any] = self._loop.create_future()

        def run() -> None:
            try:
                result = fn(self.engine, *args, **kwargs)
            except BaseException as error:
                if not future.cancelled():
                    future.set_exception(error)
            else:
                if not future.cancelled():
                    future.set_result(result)

        self._post(run)
        return await future

    def post(self, fn: Callable[[Any], None], then: Callable[[], None] | None = None) -> None:
        def run() -> None:
            fn(self.engine)
            if then is not None:
                self._loop.call_soon(then)

        self._post(run)

    def propose(self, seq_id: str, start: int, token_ids: list[int]) -> None:
        self.post(lambda engine: engine.propose(seq_id, start, token_ids))

    def _post(self, job: Callable[[], None]) -> None:
        self._inbox.append(job)
        self._want_turn(0.0001)

    def _want_turn(self, delay_s: float) -> None:
        """At the latest so long from now; a step that runs ends first."""
        if self._in_step:
            return
        if self._next_turn is not None:
            if self._next_turn.when() <= self._loop.time() + delay_s:
                return
            self._next_turn.cancel()
        self._next_turn = self._loop.call_later(delay_s, self._turn)

    def _turn(self) -> None:
        self._next_turn = None
        if self.hangs or self._stopped:
            return
        self.progress_unix_s = time.time()
        while self._inbox:
            self._inbox.popleft()()
        if not self.engine.has_work:
            self._want_turn(TICK_S)
            return
        self._in_step = True
        self._loop.call_later(self.step_s * (0.5 + self.engine._random.random()), self._step)

    def _step(self) -> None:
        """What a step made is known when it ends."""
        self._in_step = False
        if self.hangs or self._stopped:
            return
        try:
            steps = self.engine.step()
        except RuntimeError as error:
            failed = self.engine.open_sequences
            for seq_id in failed:
                self.engine.release(seq_id)
            self._on_failure(failed, error)
        else:
            running = len(self.engine.open_sequences)
            if steps:
                self._on_steps(steps, StepStats(0.0, self.step_s, len(steps), running, 0, 0, 0))
        self._want_turn(0.0)


class SimKV:
    """The workers' side of a KV plane: sometimes has the blocks, sometimes does not, never fails."""

    def __init__(self, world: World) -> None:
        self._random = world.random
        self._places = [Place("kvstore-0", "127.0.0.1", 1, "tcp")]
        self.stored: dict[bytes, BlockRef] = {}

    async def _while(self) -> None:
        await asyncio.sleep(self._random.uniform(0.0002, 0.004))

    async def find(self, keys: Sequence[bytes]) -> list[BlockRef | None]:
        await self._while()
        return [self.stored.get(key) if self._random.random() < 0.8 else None for key in keys]

    async def get(self, refs: Sequence[BlockRef], into: Sequence[Any], timeout_s: float) -> list[bool]:
        await self._while()
        return [self._random.random() < 0.8 for _ in refs]

    async def put(
        self, lease_id: str, ttl_s: float, blocks: Sequence[tuple[BlockKey, Any, int]], **_: Any
    ) -> list[BlockRef]:
        await self._while()
        refs = []
        for key, _buffer, checksum in blocks:
            places = self._places if self._random.random() < 0.9 else []
            refs.append(BlockRef(key.key, key.n_tokens, LAYOUT.block_bytes, checksum, places))
            if places:
                self.stored[key.key] = refs[-1]
        return refs

    async def lease(self, lease_id: str, keys: Sequence[bytes], ttl_s: float, **_: Any) -> list[bool]:
        await self._while()
        return [key in self.stored for key in keys]

    async def renew(self, lease_id: str, ttl_s: float) -> list[Place]:
        await self._while()
        return []

    async def release(self, lease_id: str) -> None:
        await self._while()
