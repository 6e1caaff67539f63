"""What can be set about a gateway, each with a default that works on a laptop."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import Field, SecretStr, field_validator
from pydantic_settings import SettingsConfigDict

from shared.protocol.subjects import Priority
from shared.settings import MAX_DRAIN_S, CommonSettings

MAX_TENANT_CHARS = 64


class GatewaySettings(CommonSettings):
    """`HEADRACE_` variables of `python -m services.gateway`."""

    # A validation error must not print the value: it may be a key.
    model_config = SettingsConfigDict(env_prefix="HEADRACE_", extra="ignore", hide_input_in_errors=True)

    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 takes a free one")
    api_keys: SecretStr = Field(
        SecretStr(""),
        description='Keys and their tenants, as {"key": "tenant"} or key=tenant,key=tenant; empty: open to all',
    )
    default_max_tokens: int = Field(512, ge=1, description="Output limit of a chat request that names none")
    queue_timeout_s: float = Field(60.0, gt=0, description="How long a request may wait for its first worker")
    timeout_s: float = Field(600.0, gt=0, description="How long a request may take from its first worker on")
    max_timeout_s: float = Field(3600.0, gt=0, le=3600, description="Largest of these that a request may ask for")
    max_body_bytes: int = Field(2 << 20, ge=1024, description="Largest request body")
    body_timeout_s: float = Field(30.0, gt=0, description="How long a client may take to send its body")
    max_concurrent: int = Field(256, ge=1, description="Generations that this gateway carries at once")
    max_n: int = Field(8, ge=1, le=128, description="Largest n, the answers asked for to one prompt")
    max_choices: int = Field(
        32, ge=1, le=256, description="Largest number of answers that one request may ask for: its prompts times its n"
    )
    max_queued_high: int = Field(1024, ge=1, description="Most requests of high priority in the queue, of all gateways")
    max_queued_normal: int = Field(
        1024, ge=1, description="The same of normal priority; the last gateway to start wins"
    )
    max_queued_low: int = Field(1024, ge=1, description="The same of low priority")
    max_queue_wait_s: float = Field(
        2.5,
        gt=0,
        description="Refuse requests that would wait longer than this, by the rate at which the queue drains",
    )
    standing_queue_wait_s: float = Field(
        0.75, gt=0, description="The same once work has been waiting for longer than that: under a load that stays"
    )
    max_tenant_unfinished: int = Field(
        0, ge=0, description="Most requests of one tenant that wait or are worked on; 0: no limit"
    )
    retry_after_s: int = Field(
        2, ge=1, le=60, description="What refused clients are told to wait while no rate of the queue is known"
    )
    disconnect_grace_s: float = Field(
        30.0, ge=0, description="How long a request that is keyed or in the background outlives its last client"
    )
    ping_interval_s: float = Field(15.0, gt=0, description="Comment on an idle stream, to keep proxies from closing it")
    send_timeout_s: float = Field(60.0, gt=0, description="A client that takes nothing for this long counts as gone")
    drain_s: float = Field(20.0, ge=0, le=MAX_DRAIN_S, description="How long running answers may go on after SIGTERM")
    nats_wait_s: float = Field(30.0, gt=0, description="How long to wait for NATS at the start")
    sweep_interval_s: float = Field(2.0, gt=0, description="How often requests past their deadline are looked for")

    @field_validator("api_keys")
    @classmethod
    def _check_keys(cls, keys: SecretStr) -> SecretStr:
        parse_api_keys(keys.get_secret_value())
        return keys

    @property
    def max_queued(self) -> dict[Priority, int]:
        """For the request streams, by priority."""
        return {"high": self.max_queued_high, "normal": self.max_queued_normal, "low": self.max_queued_low}

    @property
    def tenants_by_key(self) -> dict[str, str]:
        """Secret: never log it."""
        return parse_api_keys(self.api_keys.get_secret_value())


def parse_api_keys(text: str) -> dict[str, str]:
    """Keys to tenants, from JSON or a comma-separated list. Raises ValueError with a message that holds no key."""
    text = text.strip()
    if not text:
        return {}
    if text.startswith("{"):
        try:
            keys = msgspec.json.decode(text.encode(), type=dict[str, str])
        except msgspec.DecodeError as error:
            raise ValueError("must be a JSON object of strings, {key: tenant}") from error
    else:
        keys = {}
        for n, entry in enumerate(text.split(","), start=1):
            # The last equals sign separates: keys in base64 end with some.
            key, found, tenant = entry.strip().rpartition("=")
            if not found:
                raise ValueError(f"entry {n} is not of the form key=tenant")
            keys[key] = tenant
    for n, (key, tenant) in enumerate(keys.items(), start=1):
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise ValueError(f"key {n} must be printable ASCII without blanks")
        if not tenant or len(tenant) > MAX_TENANT_CHARS or not tenant.isprintable():
            raise ValueError(f"the tenant of key {n} must have 1 to {MAX_TENANT_CHARS} printable characters")
    return keys


def load_settings(**overrides: Any) -> GatewaySettings:
    """From the environment; `overrides` win. Raises pydantic's ValidationError."""
    return GatewaySettings(**overrides)
