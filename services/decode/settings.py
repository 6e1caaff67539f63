"""Settings of the decode service."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.settings import MAX_DRAIN_S, EngineSettings


class DecodeSettings(EngineSettings):
    """`HEADRACE_` variables of a decode worker."""

    decode_slots: int = Field(16, ge=1, description="Sequences in the running batch")
    decode_batch_tokens: int = Field(128, ge=16, description="Tokens of one step: decode rows, drafts, recomputed ones")
    transport: Literal["auto", "ucx", "tcp"] = Field("auto", description="How KV blocks travel; auto prefers UCX")
    kv_timeout_s: float = Field(5.0, gt=0, description="Longest wait for one exchange with a KV store")
    lease_s: float = Field(30.0, gt=1, description="Life of a block lease; renewed at a third of it")
    drain_s: float = Field(
        10.0, gt=0, le=MAX_DRAIN_S, description="Longest time that SIGTERM waits for work to be handed back"
    )
    speculation: Literal["auto", "off"] = Field("auto", description="off: nothing is drafted, drafters are not asked")
    max_draft_tokens: int = Field(16, ge=1, le=32, description="Most drafted tokens verified in one step of a sequence")
    least_drafted: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Tokens that drafters must bring in a step of a sequence to be asked; 0 where their work takes"
        " nothing from decode's, as on cores or a device of their own",
    )

    @property
    def draft_rows(self) -> int:
        """Rows that a sequence's drafts may take in one step."""
        return self.max_draft_tokens if self.speculation == "auto" else 0
