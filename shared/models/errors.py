"""What can go wrong between a model's name and its tokens. Messages are one line and say what to do."""


class ModelError(Exception):
    """Base of this package's errors."""


class ModelNotFound(ModelError):
    """Nothing answers to this name, or it could not be fetched."""


class ModelUnusable(ModelError):
    """The model is there, but damaged, of a kind that is refused, or could not be converted."""


class TemplateError(ModelError):
    """The model's chat template refused the messages (or there is none)."""
