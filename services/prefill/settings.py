"""Settings of the prefill service."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.settings import MAX_DRAIN_S, EngineSettings


class PrefillSettings(EngineSettings):
    """`HEADRACE_` variables of a prefill worker."""

    prefill_slots: int = Field(
        2, ge=1, description="Prompts in work at once: a short one waits for no long one among them"
    )
    prefill_chunk_tokens: int = Field(256, ge=16, description="Tokens of one chunk: as long as a cancel may wait")
    transport: Literal["auto", "ucx", "tcp"] = Field("auto", description="How KV blocks travel; auto prefers UCX")
    kv_timeout_s: float = Field(5.0, gt=0, description="Longest wait for one exchange with a KV store")
    max_jobs_waiting: int = Field(
        0, ge=0, description="Jobs waiting for decode at which prefill stops pulling; 0: a quarter of decode's slots"
    )
    drain_s: float = Field(
        10.0, gt=0, le=MAX_DRAIN_S, description="Longest time that SIGTERM waits for work to be handed back"
    )
