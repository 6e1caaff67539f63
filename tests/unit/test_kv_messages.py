"""The KV plane's messages: bounded, and read by nobody else's decoder."""

from __future__ import annotations

import msgspec
import pytest

from shared.protocol.kv import (
    KEY_BYTES,
    MAX_BLOCKS,
    MAX_HEADER_BYTES,
    MAX_LEASE_ID,
    MAX_TENANT,
    AskStats,
    BlockMeta,
    Find,
    Found,
    Get,
    Lease,
    Put,
    Refusal,
    Sending,
    Verdicts,
    decode_reply,
    decode_request,
    encode_kv,
)

WORST = BlockMeta(b"\xff" * KEY_BYTES, 2**31, 2**40, 2**64 - 1)


@pytest.mark.parametrize(
    "message",
    [
        Put([WORST] * MAX_BLOCKS, "r" * MAX_LEASE_ID, 1e300, "t" * MAX_TENANT),
        Get([WORST] * MAX_BLOCKS),
        Find([WORST.key] * MAX_BLOCKS),
        Lease("r" * MAX_LEASE_ID, [WORST.key] * MAX_BLOCKS, 1e300, "t" * MAX_TENANT),
    ],
)
def test_the_largest_request_fits_into_a_header(message: Put | Get | Find | Lease) -> None:
    data = encode_kv(message)
    assert len(data) <= MAX_HEADER_BYTES
    assert decode_request(data) == message


@pytest.mark.parametrize(
    "message",
    [Found([WORST] * MAX_BLOCKS), Verdicts(["refused"] * MAX_BLOCKS), Sending([True] * MAX_BLOCKS), Refusal("x" * 999)],
)
def test_the_largest_reply_fits_into_a_header(message: Found | Verdicts | Sending | Refusal) -> None:
    data = encode_kv(message)
    assert len(data) <= MAX_HEADER_BYTES
    assert decode_reply(data) == message


def test_a_reply_is_no_request() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_request(encode_kv(Verdicts([])))
    with pytest.raises(msgspec.DecodeError):
        decode_reply(encode_kv(AskStats()))


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x81\xa4type", encode_kv(AskStats()) + b"x"])
def test_what_is_not_a_message_is_an_error(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_request(data)
