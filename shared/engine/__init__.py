"""Model loading, paged KV cache, batch-invariant forward, sampling. Knows nothing of NATS, Redis or UCX.

`Engine` is the synchronous core, `AsyncEngine` runs it in a thread beside an event loop.
"""

from shared.engine.async_engine import AsyncEngine
from shared.engine.config import EngineConfig
from shared.engine.engine import Engine
from shared.engine.errors import (
    BadLogits,
    EngineError,
    EngineStopped,
    NumericsError,
    OutOfBlocks,
    PromptTooLong,
    SequenceTooLarge,
    UnknownSequence,
    UnsupportedModel,
)
from shared.engine.sequence import Sequence, SequenceStep, StepStats

__all__ = [
    "AsyncEngine",
    "BadLogits",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineStopped",
    "NumericsError",
    "OutOfBlocks",
    "PromptTooLong",
    "Sequence",
    "SequenceStep",
    "SequenceTooLarge",
    "StepStats",
    "UnknownSequence",
    "UnsupportedModel",
]
