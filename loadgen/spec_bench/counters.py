"""Reads what decode workers and drafters count about speculation, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

from loadgen.spec_bench.errors import NotMeasured

_PREFIXES = ("headrace_spec_decode_", "headrace_draft_")


async def read_counters(http: httpx.AsyncClient, urls: Iterable[str]) -> dict[str, float]:
    """Sums over the endpoints, by `name{label="value"}`. Raises NotMeasured."""
    found: dict[str, float] = {}
    for url in urls:
        try:
            answer = await http.get(url, timeout=10.0)
            answer.raise_for_status()
            for name, value in parse(answer.text).items():
                found[name] = found.get(name, 0) + value
        except (httpx.HTTPError, ValueError) as error:
            raise NotMeasured(f"{url} does not tell its metrics: {type(error).__name__}: {error}") from error
    return found


def parse(text: str) -> dict[str, float]:
    """Counters that concern speculation, and the counts and sums of such histograms. Raises ValueError for nonsense."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if family.type not in ("counter", "histogram") or not family.name.startswith(_PREFIXES):
            continue
        for sample in family.samples:
            if sample.name.endswith(("_total", "_count", "_sum")):
                labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def risen(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """By how much each counter grew; a worker that restarted meanwhile began at 0 again."""
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    return {name: round(value if value >= 0 else after[name], 6) for name, value in grown.items() if value}
