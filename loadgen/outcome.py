"""What happened to one request: times in seconds since the phase began, counts, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Outcome:
    """Filled while the request runs. `error` is None for a success, else a short kind such as `http_429` or `timeout`.

    `intended_s` is when the load asked for it, `sent_s` when it left. Latencies count from `intended_s`, so that a slow
    server cannot hide its queue by holding up the sender.
    """

    number: int
    asked_prompt_tokens: int
    asked_output_tokens: int
    intended_s: float
    sent_s: float = 0.0
    text_s: list[float] = field(default_factory=list)
    """When each chunk with text came. A chunk may hold several tokens."""
    end_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    counted_by_server: bool = False
    finish_reason: str | None = None
    error: str | None = None
    error_detail: str = ""
    request_id: str = ""
    retry_after: str | None = None
    """The header of that name, of an answer that was none."""

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def refused(self) -> bool:
        """The server had too much to do, and said so."""
        return self.error in ("http_429", "http_503") and self.retry_after is not None

    @property
    def come_again_s(self) -> float:
        """How long a client that was refused shall wait; 0 for all others, and where a date was told."""
        return float(self.retry_after) if self.refused and self.retry_after and self.retry_after.isdecimal() else 0.0

    @property
    def ttft_s(self) -> float | None:
        return self.text_s[0] - self.intended_s if self.text_s else None

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None for a single token."""
        if len(self.text_s) < 2 or self.output_tokens < 2:
            return None
        return (self.text_s[-1] - self.text_s[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Between chunks with text: what a reader sees as inter-token latency."""
        return [later - earlier for earlier, later in zip(self.text_s, self.text_s[1:], strict=False)]
