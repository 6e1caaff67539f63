"""Settings of the draft service."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.protocol.drafts import MAX_FORKS, MAX_PROPOSAL_TOKENS
from shared.settings import EngineSettings


class DraftSettings(EngineSettings):
    """`HEADRACE_` variables of a drafter."""

    speculation: Literal["auto", "off"] = Field("auto", description="off: guess nothing, for anybody")
    draft_model: str = Field(
        "auto",
        description="A smaller model with the same tokenizer; auto: the one shipped for the target, if any; "
        "empty: only lookups, which need no model",
    )
    forget_after_s: float = Field(60.0, gt=1, description="A sequence that nobody asked about for this long is dropped")
    max_sequences: int = Field(256, ge=1, description="Sequences remembered; the least recently used is forgotten")
    max_known_tokens: int = Field(
        1_000_000, ge=1024, description="Tokens of all sequences remembered, about 100 bytes each"
    )
    recent_tokens: int = Field(65_536, ge=256, description="Recent output tokens kept of each tenant, 44 bytes each")
    recent_tenants: int = Field(32, ge=1, description="Tenants whose recent outputs are kept")
    draft_slots: int = Field(16, ge=1, description="Sequences that the draft model runs at once")
    draft_batch_tokens: int = Field(
        128, ge=16, description="Tokens of one step of the draft model: a new sequence delays the others by that"
    )
    max_proposal_tokens: int = Field(
        33, ge=2, le=MAX_PROPOSAL_TOKENS, description="No guess reaches further beyond what decode has told"
    )
    draft_alternatives: int = Field(
        3, ge=0, le=MAX_FORKS, description="Next-likeliest first tokens from which the draft model goes on too"
    )
    kv_memory_gib: float = Field(0.25, gt=0, description="Memory of the draft model's KV cache in GiB")
