"""The errors that the engine raises. Each message says what happened, to which id, and what to do."""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error of this package."""


class UnsupportedModel(EngineError):
    """The model cannot be served exactly by this engine; the message names the reason."""


class NumericsError(EngineError):
    """This machine's kernels gave no batch-invariant result where one is needed."""


class OutOfBlocks(EngineError):
    """The KV cache has too few free blocks now; some may become free when other sequences end."""


class SequenceTooLarge(EngineError):
    """The sequence could never fit into this worker's KV cache, even alone."""


class PromptTooLong(EngineError):
    """The tokens known leave no room for one more within the model's context length."""


class BadLogits(EngineError):
    """The model gave logits that are not numbers for a sequence; only that sequence fails."""


class UnknownSequence(EngineError):
    """No sequence of that id is known, or it is not in the state that the call needs."""


class EngineStopped(EngineError):
    """The engine's thread has stopped; nothing more will be computed."""
