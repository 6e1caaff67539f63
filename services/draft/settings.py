"""Settings of the draft service."""

from __future__ import annotations

from pydantic import Field

from shared.settings import EngineSettings


class DraftSettings(EngineSettings):
    """`HEADRACE_` variables of a drafter."""

    draft_model: str = Field("", description="A smaller model with the same tokenizer; empty: prompt lookup only")
    forget_after_s: float = Field(60.0, gt=1, description="A sequence that nobody asked about for this long is dropped")
    max_sequences: int = Field(256, ge=1, description="Sequences remembered; the least recently used is forgotten")
    draft_slots: int = Field(16, ge=1, description="Sequences that the draft model runs at once")
    draft_batch_tokens: int = Field(256, ge=16, description="Tokens of one step of the draft model")
    max_proposal_tokens: int = Field(17, ge=1, le=64, description="Longest proposal")
    kv_memory_gib: float = Field(0.25, gt=0, description="Memory of the draft model's KV cache in GiB")
