"""What is learnt from UCX's own log."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import structlog

from shared.transport.ucx_log import UcxLog

CONFIG = "[1.2] [vm:1 :1]  ucp_worker.c:1984 UCX  INFO    ucp_context_0 {} cfg#{} tag({})  rma(posix/memory)  am(x/y)\n"


@pytest.fixture
def ucx_log() -> Iterator[UcxLog]:
    made = UcxLog()
    yield made
    os.close(made.descriptor)


def write(ucx_log: UcxLog, text: str, offset: int = 0) -> int:
    """As UCX does: through a descriptor of its own, at an offset of its own. Answers the next offset."""
    descriptor = os.open(f"/proc/self/fd/{ucx_log.descriptor}", os.O_WRONLY)
    try:
        return offset + os.pwrite(descriptor, text.encode(), offset)
    finally:
        os.close(descriptor)


def test_the_transports_of_each_kind_of_endpoint_are_known(ucx_log: UcxLog) -> None:
    end = write(ucx_log, CONFIG.format("self", 0, "self/memory cma/memory"))
    end = write(ucx_log, CONFIG.format("intra-node", 1, "posix/memory cma/memory"), end)
    end = write(ucx_log, CONFIG.format("inter-node", 2, "tcp/eth0 tcp/eth1"), end)
    ucx_log.refresh()
    assert ucx_log.lanes == [("self", "cma"), ("posix", "cma"), ("tcp",)]
    write(ucx_log, CONFIG.format("intra-node", 3, "posix/memory cma/memory"), end)
    ucx_log.refresh()
    assert ucx_log.lanes == [("self", "cma"), ("tcp",), ("posix", "cma")]


def test_a_line_that_is_not_complete_yet_is_read_when_it_is(ucx_log: UcxLog) -> None:
    line = CONFIG.format("intra-node", 1, "posix/memory cma/memory")
    end = write(ucx_log, line[:60])
    ucx_log.refresh()
    assert ucx_log.lanes == []
    write(ucx_log, line[60:], end)
    ucx_log.refresh()
    assert ucx_log.lanes == [("posix", "cma")]


def test_warnings_are_passed_on_and_the_usual_noise_is_not(ucx_log: UcxLog) -> None:
    write(
        ucx_log,
        "[1.2] [vm:1 :0] parser.c:1 UCX  WARN  unused environment variables: UCX_X\n"
        "[1.2] [vm:1 :0] tcp.c:1 UCX  ERROR connection refused\n"
        "[1.2] [vm:1 :0] tcp.c:1 UCX  DIAG  nothing of note\n",
    )
    with structlog.testing.capture_logs() as logs:
        ucx_log.refresh()
    assert [entry["message"] for entry in logs] == ["connection refused"]


def test_the_log_does_not_grow_without_bound(ucx_log: UcxLog) -> None:
    end = 0
    for _ in range(40):
        end = write(ucx_log, "x" * 99_999 + "\n", end)
        ucx_log.refresh()
    assert os.fstat(ucx_log.descriptor).st_blocks * 512 < 1 << 21
    write(ucx_log, CONFIG.format("intra-node", 1, "posix/memory"), end)
    ucx_log.refresh()
    assert ucx_log.lanes == [("posix",)]
