"""How long-running steps of model fetching report their progress. The terminal side is not here."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with a phase (download, unpack, convert, digest, wait), what is done and the total; total 0 is unknown."""


def silent(_phase: str, _done: int, _total: int) -> None:
    """Reports nothing."""
