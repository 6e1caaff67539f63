"""docs/protocol.md cannot go stale: its tables are compared with the structs, subjects and streams that run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.gateway.errors import ApiError, from_info
from services.gateway.settings import GatewaySettings
from shared.bus import WEIGHTS
from shared.protocol.records import Accepted, Claimed, Ended, ErrorInfo, HandedBack, TokenLogprobs, Tokens, Usage
from shared.protocol.status import InstanceStatus
from shared.protocol.streams import STREAMS
from shared.protocol.subjects import (
    CANCEL,
    RETRY,
    STATUS_PING,
    SUBMIT,
    encode_token,
    live_subject,
    log_subject,
    status_subject,
)

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text()
STRUCTS: tuple[type[msgspec.Struct], ...] = (
    Accepted,
    Claimed,
    HandedBack,
    Tokens,
    TokenLogprobs,
    Ended,
    Usage,
    ErrorInfo,
    InstanceStatus,
)


def table(struct: type[msgspec.Struct]) -> str:
    """The field table of a struct, as the document must have it."""
    schema = msgspec.json.schema(struct)["$defs"][struct.__name__]
    rows = ["| field | type | when absent |", "|---|---|---|"]
    for name, field in schema["properties"].items():
        absent = "never" if name in schema["required"] else f"`{_json(field.get('default'))}`"
        rows.append(f"| `{name}` | {_type(field)} | {absent} |")
    return "\n".join(rows)


def _type(field: dict[str, Any]) -> str:
    if "enum" in field:
        return " or ".join(f"`{_json(value)}`" for value in field["enum"])
    if "anyOf" in field:
        return " or ".join(_type(branch) for branch in field["anyOf"])
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if field.get("type") == "array":
        pair = field.get("prefixItems")
        return f"[{', '.join(map(_type, pair))}]" if pair else f"list of {_type(field['items'])}"
    if field.get("type") == "object":
        return f"object of {_type(field['additionalProperties'])}"
    return str(field["type"])


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_the_documented_fields_are_those_of_the_struct(struct: type[msgspec.Struct]) -> None:
    found = re.search(rf"<!-- fields of {struct.__name__} -->\n(.*?)\n\n", DOCUMENT, re.DOTALL)
    assert found is not None, f"no table of {struct.__name__}"
    assert found[1] == table(struct), f"the table must read:\n{table(struct)}"


def test_every_stream_and_public_subject_is_documented() -> None:
    for stream in STREAMS:
        row = next(line for line in DOCUMENT.splitlines() if line.startswith(f"| `{stream.name}` |"))
        assert f"`{stream.subjects[0]}`" in row
        assert stream.retention in row
    for subject in (SUBMIT, CANCEL, RETRY, STATUS_PING, "hr.live.<tenant>.<request>", "hr.tok.<tenant>.<request>"):
        assert f"`{subject}`" in DOCUMENT
    assert live_subject("a", "b") == "hr.live.a.b"
    assert log_subject("a", "b") == "hr.tok.a.b"
    assert status_subject("decode", "x") == "hr.status.decode.x"


def test_the_examples_of_encoded_names_are_right() -> None:
    examples = re.findall(r"`([^`\n]+)` becomes `([^`\n]+)`", DOCUMENT)
    assert len(examples) >= 2
    for name, encoded in examples:
        assert encode_token(name) == encoded


def test_the_documented_error_codes_have_the_documented_status() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d{3}) \|.*\| in the log \|$", DOCUMENT, re.MULTILINE)
    assert len(rows) >= 4
    for code, status in rows:
        assert from_info(ErrorInfo("m", code=code)).status == int(status), code


@pytest.mark.parametrize(
    "name",
    [
        "queue_timeout_s", "timeout_s", "max_timeout_s", "max_queued_high", "max_queue_wait_s",
        "standing_queue_wait_s", "retry_after_s", "disconnect_grace_s",
    ],
)  # fmt: skip
def test_the_documented_defaults_of_settings_are_those_of_the_gateway(name: str) -> None:
    default = GatewaySettings.model_fields[name].default
    documented = re.findall(rf"`{name}`[^`(]*\(([\d.]+)\)", DOCUMENT)
    if name == "max_queued_high":
        documented = re.findall(r"`max_queued_low`, set by the\s+gateways, (\d+) each", DOCUMENT)
        others = [GatewaySettings.model_fields[f"max_queued_{p}"].default for p in ("normal", "low")]
        assert others == [default, default]
    assert documented, "not documented"
    assert {float(value) for value in documented} == {float(default)}


def test_the_documented_shares_of_the_priorities_are_those_of_the_queue() -> None:
    words = f"High priority gets {WEIGHTS['high']} of {sum(WEIGHTS.values())} pulls, normal {WEIGHTS['normal']} and low"
    assert f"{words} {WEIGHTS['low']}," in DOCUMENT


def test_every_error_code_of_the_gateway_is_documented() -> None:
    sources = (Path(__file__).resolve().parents[2] / "services" / "gateway").glob("*.py")
    codes: set[str] = set()
    for source in sources:
        codes |= set(re.findall(r"code=\"(\w+)\"", source.read_text()))
        codes |= set(re.findall(r"overloaded\(\s*\d+,\s*\"(\w+)\"", source.read_text()))
    assert len(codes) > 10
    undocumented = {code for code in codes if f"`{code}`" not in DOCUMENT}
    assert not undocumented
    assert issubclass(ApiError, Exception)
