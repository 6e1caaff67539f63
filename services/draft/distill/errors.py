"""What ends a distillation in one line."""


class DistillError(Exception):
    """The target cannot be distilled, or the output directory holds something else; the message says what to do."""
