"""What decode and drafters send each other is bounded, whoever sends it."""

from __future__ import annotations

import msgspec
import pytest

from shared.protocol.drafts import (
    MAX_ALTERNATIVE_TOKENS,
    MAX_ALTERNATIVES,
    MAX_CONTEXT_TOKENS,
    MAX_DRAFT_BYTES,
    MAX_PROPOSAL_TOKENS,
    MAX_PROPOSALS,
    DraftContext,
    Proposal,
    Proposals,
    decode_context,
    decode_proposals,
    encode_draft,
)
from shared.protocol.jobs import SamplingParams

LARGEST_ID = 2**31 - 1


def test_the_largest_messages_fit() -> None:
    params = SamplingParams(max_tokens=10, seed=2**63, logit_bias=dict.fromkeys(range(1000), 1.5))
    context = DraftContext(
        "r" * 256, "t" * 256, 0, [LARGEST_ID] * MAX_CONTEXT_TOKENS, "i" * 256, 64, LARGEST_ID, params, "s" * 256
    )
    assert decode_context(encode_draft(context)) == context
    proposal = Proposal(
        "r" * 256,
        LARGEST_ID,
        [LARGEST_ID] * MAX_PROPOSAL_TOKENS,
        "p" * 256,
        [0.5] * MAX_PROPOSAL_TOKENS,
        True,
        [[LARGEST_ID] * MAX_ALTERNATIVE_TOKENS] * MAX_ALTERNATIVES,
        [[0.5] * MAX_ALTERNATIVE_TOKENS] * MAX_ALTERNATIVES,
    )
    proposals = Proposals([proposal] * MAX_PROPOSALS)
    assert decode_proposals(encode_draft(proposals)) == proposals


@pytest.mark.parametrize(
    "context",
    [
        DraftContext("r", "t", 0, [1] * (MAX_CONTEXT_TOKENS + 1), "i"),
        DraftContext("r", "t", -1, [1], "i"),
        DraftContext("r", "t", 0, [-1], "i"),
        DraftContext("r", "t", 0, [1], "i", wanted=MAX_PROPOSAL_TOKENS + 1),
        DraftContext("r" * 257, "t", 0, [1], "i"),
    ],
)
def test_a_context_beyond_the_limits_is_not_read(context: DraftContext) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_context(encode_draft(context))


@pytest.mark.parametrize(
    "items",
    [
        [Proposal("r", 0, [1])] * (MAX_PROPOSALS + 1),
        [Proposal("r", 0, [1] * (MAX_PROPOSAL_TOKENS + 1))],
        [Proposal("r", 0, [-3])],
        [Proposal("r", 0, [1], confidence=[0.5] * (MAX_PROPOSAL_TOKENS + 1))],
        [Proposal("r", 0, [1], alternatives=[[2]] * (MAX_ALTERNATIVES + 1))],
        [Proposal("r", 0, [1], alternatives=[[2] * (MAX_ALTERNATIVE_TOKENS + 1)])],
        [Proposal("r", 0, [1], alternatives=[[-3]])],
        [Proposal("r", 0, [1], alternative_confidence=[[0.5]] * (MAX_ALTERNATIVES + 1))],
        [Proposal("r", 0, [1], alternative_confidence=[[0.5] * (MAX_ALTERNATIVE_TOKENS + 1)])],
        [Proposal("r", 0, [1], alternative_confidence=[["a"]])],  # type: ignore[list-item]
        [Proposal("r", 0, [1], alternatives=[["a"]])],  # type: ignore[list-item]
        [Proposal("r", 0, [1], alternatives=[2])],  # type: ignore[list-item]
    ],
)
def test_proposals_beyond_the_limits_are_not_read(items: list[Proposal]) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_proposals(encode_draft(Proposals(items)))


def test_a_message_that_is_too_large_is_neither_sent_nor_read() -> None:
    params = SamplingParams(max_tokens=10, seed=1, stop=["x" * MAX_DRAFT_BYTES])
    context = DraftContext("r", "t", 0, [1], "i", num_prompt=1, params=params)
    with pytest.raises(ValueError, match="larger than"):
        encode_draft(context)
    with pytest.raises(msgspec.DecodeError):
        decode_context(msgspec.msgpack.encode(context))
