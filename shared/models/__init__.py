"""From a model's name to files on disk, and from text to token ids. Torch is never imported here.

Not here: loading weights into memory (`shared.engine`).
"""

from shared.models.errors import ModelError, ModelNotFound, ModelUnusable, TemplateError
from shared.models.resolve import ModelFiles, resolve_model
from shared.models.token_bytes import TokenBytes
from shared.models.tokenizer import ChatTokenizer

__all__ = [
    "ChatTokenizer",
    "ModelError",
    "ModelFiles",
    "ModelNotFound",
    "ModelUnusable",
    "TemplateError",
    "TokenBytes",
    "resolve_model",
]
