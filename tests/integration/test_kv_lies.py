"""Whatever a store does wrong, its client uses no wrong byte, counts what happened, and works on."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from shared.blocks import BlockKey, KVClient, checksum
from shared.protocol.blocks import BlockRef, Place
from shared.telemetry.metrics import KVTransferMetrics
from shared.transport import Transport, pick_transport
from tests.conftest import free_port, wait_for_port
from tests.integration.kv_harness import SECRET, eventually
from tests.integration.kv_liar import GET_FAULTS, LATE_S, PUT_FAULTS, SIZE, content, key_of

COUNT = 6
TIMEOUT_S = 0.4
TOUCHED = 0xEE

Array = npt.NDArray[np.uint8]


@pytest.fixture(scope="module", params=["tcp", "ucx"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def transport(kind: str) -> AsyncIterator[Transport]:
    made = pick_transport("ucx" if kind == "ucx" else "tcp")
    yield made
    await made.close()


class Liar:
    """The store's process."""

    def __init__(self, kind: str) -> None:
        port = free_port()
        command = [sys.executable, "-m", "tests.integration.kv_liar", kind, str(port), SECRET]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        wait_for_port(port, self._process, timeout_s=30)
        self.place = Place("liar", "127.0.0.1", port, kind)

    async def says(self, line: str) -> None:
        """Return when it has printed this."""
        assert self._process.stdout is not None
        async with asyncio.timeout(10):
            while (await asyncio.to_thread(self._process.stdout.readline)).strip() != line:
                assert self._process.poll() is None

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def liar(kind: str) -> Iterator[Liar]:
    made = Liar(kind)
    yield made
    made.end()


class Worker:
    """A client of the liar, and what it has counted."""

    def __init__(self, liar: Liar, transport: Transport) -> None:
        self.liar = liar
        self.place = liar.place
        self.metrics = KVTransferMetrics(CollectorRegistry())
        self.client = KVClient(lambda: [liar.place], transport, SECRET, None, stage="test", metrics=self.metrics)

    def counted(self, hop: str) -> tuple[int, int]:
        """Exchanges that failed, blocks that arrived damaged."""
        failures = self.metrics.transfer_failures.labels(hop)._value.get()
        return int(failures), int(self.metrics.blocks_checksum_failed._value.get())


@pytest_asyncio.fixture
async def worker(liar: Liar, transport: Transport) -> AsyncIterator[Worker]:
    made = Worker(liar, transport)
    yield made
    made.client.close()


families = itertools.count()


def family(fault: str) -> list[bytes]:
    n = next(families)
    return [key_of(fault, n, i) for i in range(COUNT)]


def right(keys: list[bytes], hits: list[bool], into: list[Array]) -> bool:
    """Whether all that is called a hit is what it should be."""
    return all(not hit or np.array_equal(got, content(key)) for key, hit, got in zip(keys, hits, into, strict=True))


@pytest.mark.parametrize("fault", GET_FAULTS)
async def test_what_a_store_sends_wrong_short_late_or_not_at_all_is_never_used(worker: Worker, fault: str) -> None:
    keys = family(fault)
    refs = [BlockRef(key, 32, SIZE, checksum(content(key)), [worker.place]) for key in keys]
    into = [np.zeros(SIZE, np.uint8) for _ in keys]
    async with asyncio.timeout(TIMEOUT_S + 4):
        hits = await worker.client.get(refs, into, timeout_s=TIMEOUT_S)
    assert right(keys, hits, into)
    if fault != "extra":  # which does no harm yet
        assert not all(hits)
        assert sum(worker.counted("store_to_test")) > 0
    if fault == "reversed":
        assert worker.counted("store_to_test") == (0, COUNT)

    for buffer in into:
        buffer[:] = TOUCHED  # the worker gave the blocks to another sequence
    await asyncio.sleep(2 * LATE_S - TIMEOUT_S if fault == "late" else 0.1)
    assert all((buffer == TOUCHED).all() for buffer in into)

    async def works_again() -> bool:
        hits = await worker.client.get(refs, into, timeout_s=1)
        assert right(keys, hits, into)
        return all(hits)

    await eventually(works_again)


@pytest.mark.parametrize("fault", PUT_FAULTS)
async def test_a_put_that_the_store_breaks_off_names_no_place(worker: Worker, fault: str) -> None:
    keys = family(fault)
    blocks = [(BlockKey(key, 32), content(key), checksum(content(key))) for key in keys]
    async with asyncio.timeout(TIMEOUT_S + 4):
        refs = await worker.client.put("request-1", 60.0, blocks, timeout_s=TIMEOUT_S)
    assert [ref.places for ref in refs] == [[]] * COUNT
    assert worker.counted("test_to_store")[0] == 1

    async def works_again() -> bool:
        refs = await worker.client.put("request-1", 60.0, blocks, timeout_s=5)
        return all(ref.places == [worker.place] for ref in refs)

    await eventually(works_again)


async def test_a_connection_on_which_the_peer_spoke_out_of_turn_is_not_used_again(worker: Worker, kind: str) -> None:
    """One buffer too many would be read as the next answer."""
    if kind == "ucx":
        pytest.skip("UCX keeps the sender waiting for somebody who takes it: the next exchange is late, a miss as any")
    keys = family("extra")
    refs = [BlockRef(key, 32, SIZE, checksum(content(key)), [worker.place]) for key in keys]
    into = [np.zeros(SIZE, np.uint8) for _ in keys]
    assert all(await worker.client.get(refs, into, timeout_s=5))
    await worker.liar.says("extra sent")
    assert all(await worker.client.get(refs, into, timeout_s=5))
    assert worker.counted("store_to_test") == (0, 0)
