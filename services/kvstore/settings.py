"""Settings of the KV store. All have defaults that work on a laptop."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.settings import CommonSettings


class KVStoreSettings(CommonSettings):
    """`HEADRACE_STORE_MEMORY_GIB=4 python -m services.kvstore`"""

    store_memory_gib: float = Field(1.0, gt=0, description="Memory for blocks in GiB, taken at start")
    store_port: int = Field(0, ge=0, le=65535, description="Port that workers connect to; 0 takes a free one")
    transport: Literal["auto", "ucx", "tcp"] = Field("auto", description="auto: UCX where it loads, else TCP")
    store_max_connections: int = Field(256, ge=1, description="Workers' connections at a time; more are refused")
    store_max_leases: int = Field(8192, ge=1, description="Leases (requests) at a time; more are refused")
    store_max_lease_s: float = Field(3600.0, gt=0, description="Longest time that one lease call can ask for")
    store_lease_rest_s: float = Field(
        5.0, gt=0, description="After so long without use of a lease the store looks whether its request has ended"
    )
    store_prefault: bool = Field(True, description="Touch the memory in the background after the start")
    store_fault_injection: bool = Field(False, description="For tests: lets peers damage blocks")
