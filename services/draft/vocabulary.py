"""A draft model must speak the target's token ids exactly."""

from __future__ import annotations

from shared.models import ChatTokenizer, ModelFiles
from shared.worker.process import StartupError


def require_same_vocabulary(target: ModelFiles, draft: ModelFiles) -> None:
    """Raises StartupError when the two tokenizers differ in any token, special or not, or in what ends a text."""
    ours, theirs = ChatTokenizer.load(target.path), ChatTokenizer.load(draft.path)
    if ours.raw.get_vocab(with_added_tokens=True) != theirs.raw.get_vocab(with_added_tokens=True):
        raise StartupError(
            f"draft model {draft.name} has another vocabulary than {target.name}; "
            "set HEADRACE_DRAFT_MODEL to a model with the same tokenizer, or leave it empty"
        )
    if ours.eos_token_ids != theirs.eos_token_ids:
        raise StartupError(
            f"draft model {draft.name} ends a text with tokens {sorted(theirs.eos_token_ids)}, {target.name} with "
            f"{sorted(ours.eos_token_ids)}; they must be the same"
        )
