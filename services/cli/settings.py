"""Settings of the `headrace` command: `HEADRACE_` variables with defaults for one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import platformdirs
from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.settings import MAX_DRAIN_S

MAX_INSTANCES: Final = 64
"""Of one stage on one machine."""


class CliSettings(BaseSettings):
    """What `headrace` itself needs; the services' own variables are handed on to them unchanged."""

    model_config = SettingsConfigDict(env_prefix="HEADRACE_", extra="ignore")

    home: Path = Field(
        default_factory=lambda: platformdirs.user_state_path("headrace"),
        description="State: NATS store, logs, sockets, the secret. One stack per directory",
    )
    model: str = Field(
        default="smollm2-135m-instruct", description="A built-in name, a hub name, a directory or a GGUF file"
    )
    draft_model: str = Field(
        default="auto",
        description="The same for the drafter; auto: the one shipped for the model, if any; empty: lookups alone",
    )
    nats_url: str = Field(default="", description="An external NATS server; empty starts an embedded one")
    redis_url: str = Field(default="", description="An external Redis or Valkey; empty starts an embedded one")
    nats_port: int = Field(default=4222, ge=1, le=65535, description="Port of the embedded NATS server")
    redis_port: int = Field(default=6380, ge=1, le=65535, description="Port of the embedded Valkey server")
    port: int = Field(
        default=8000, ge=1, le=65535 - MAX_INSTANCES, description="Port of gateway-0; others take the next"
    )
    threads: int = Field(
        default=1, ge=1, description="Compute threads of each worker; more than one core each is 10x slower"
    )
    kv_memory_gib: float = Field(default=1.0, gt=0, description="Memory of each worker's KV cache in GiB")
    store_memory_gib: float = Field(default=1.0, gt=0, description="Memory of each KV store in GiB")
    drain_s: float = Field(
        default=20.0,
        ge=0,
        le=MAX_DRAIN_S,
        description="Longest drain of the services that `up` starts; their own defaults are no longer",
    )
    start_timeout_s: float = Field(default=300.0, gt=0, description="How long `up` waits for the pipeline to answer")
    api_key: SecretStr = Field(
        default=SecretStr(""), description="Sent by `headrace chat` when the gateway asks for keys"
    )
