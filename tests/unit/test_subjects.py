"""Subject tokens: every name survives, and what no name made is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.protocol.subjects import decode_token, encode_token


@given(st.text(min_size=1))
def test_every_name_comes_back(name: str) -> None:
    assert decode_token(encode_token(name)) == name


@pytest.mark.parametrize("token", ["=110000=", "=ffffffff=", "=" + "f" * 100 + "="])
def test_a_character_that_does_not_exist_is_a_value_error(token: str) -> None:
    with pytest.raises(ValueError, match=r"character|range"):
        decode_token(token)
