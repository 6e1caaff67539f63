"""What decode writes into a request's log: every token once, in order, in records of bounded size."""

from __future__ import annotations

import pytest

from services.decode.worker import MAX_RECORD_TOKENS, token_records
from shared.engine import SequenceStep
from shared.protocol.records import TokenLogprobs


def step(first: int, count: int) -> SequenceStep:
    ids = list(range(first, first + count))
    logprobs = [TokenLogprobs(-float(token)) for token in ids]
    return SequenceStep("s", first, ids, "".join(f"<{i}>" for i in ids), first, None, 0, 0, logprobs)


@pytest.mark.parametrize("counts", [[1], [0], [3, 0, 9], [9] * 300, [MAX_RECORD_TOKENS, 1], [MAX_RECORD_TOKENS + 7, 2]])
def test_every_token_is_written_once_in_records_of_bounded_size(counts: list[int]) -> None:
    steps, first = [], 5
    for count in counts:
        steps.append(step(first, count))
        first += count
    records = list(token_records(steps, epoch=4, index=5))
    assert [token for record in records for token in record.ids] == list(range(5, first))
    assert "".join(record.text for record in records) == "".join(f"<{i}>" for i in range(5, first))
    for record in records:
        assert record.index == record.ids[0]
        assert record.epoch == 4
        assert [token.logprob for token in record.logprobs] == [-float(i) for i in record.ids]
        assert len(record.ids) <= max(MAX_RECORD_TOKENS, *counts)
    assert len(records) <= 1 + sum(counts) // (MAX_RECORD_TOKENS - 8)
