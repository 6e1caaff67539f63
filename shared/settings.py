"""Settings that several services share. Each service adds its own class on top; all read `HEADRACE_` variables."""

from __future__ import annotations

import os
import socket
from typing import Final, Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

MAX_DRAIN_S: Final = 600.0
"""Bound of `drain_s` in every service that has it: whoever stops a service waits that long for it, and longer."""


class CommonSettings(BaseSettings):
    """What every service needs to join the pipeline. The defaults fit `headrace up` on a laptop."""

    model_config = SettingsConfigDict(env_prefix="HEADRACE_", extra="ignore")

    nats_url: str = Field("nats://127.0.0.1:4222", description="NATS server (2.11 or newer, JetStream on)")
    redis_url: str = Field("redis://127.0.0.1:6380/0", description="Redis 7 or Valkey: the block index")
    model: str = Field("smollm2-135m-instruct", description="A built-in name, a hub name, a directory or a GGUF file")
    instance: str = Field(
        default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}",
        description="Stable name of this instance, shown in status, logs and claims",
    )
    host: str = Field("127.0.0.1", description="Address that this service's own listeners bind")
    advertise_host: str = Field("", description="Address that peers use to reach this service; `host` when empty")
    metrics_port: int = Field(0, ge=0, le=65535, description="Prometheus port; 0 takes a free one")
    secret: SecretStr = Field(SecretStr(""), description="Shared by all services; peers of the KV plane prove it")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level logged")
    log_format: Literal["auto", "json", "console"] = Field("auto", description="auto: console on a terminal, else JSON")

    @property
    def reachable_host(self) -> str:
        return self.advertise_host or self.host


class EngineSettings(CommonSettings):
    """What the services that run a model need besides."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one")
    dtype: Literal["auto", "fp32", "fp16-packed", "int8", "bf16"] = Field(
        "auto", description="auto: fp16-packed products on CPU, bf16 on CUDA; int8 is quicker on CPU and less exact"
    )
    attention: Literal["auto", "kernels", "torch", "triton", "flash"] = Field(
        "auto", description="auto: the fastest exact one that is installed and passes its trial; flash needs fast"
    )
    exactness: Literal["exact", "fast"] = Field(
        "exact", description="fast (CUDA only): quicker kernels, but tokens near a tie may depend on the batch"
    )
    cuda_graphs: bool = Field(True, description="Capture decode steps at start; only CUDA has them")
    threads: int = Field(1, ge=1, description="Compute threads of this process; more than one core each is 10x slower")
    block_tokens: int = Field(32, ge=8, le=256, description="Tokens in a KV block; the same in every worker")
    stall_s: float = Field(
        10.0, gt=1, description="An engine step longer than this counts as hung: requests move on; 3 times this: exit"
    )
    kv_memory_gib: float = Field(1.0, gt=0, description="Memory of this worker's KV cache in GiB")
    prefix_caching: bool = Field(True, description="Keep blocks of ended requests for those that begin alike")
