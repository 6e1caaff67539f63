"""Which growth of a process counts as a leak."""

from __future__ import annotations

from pathlib import Path

from loadgen.chaos.leaks import Leaks, compare
from loadgen.chaos.stack import Stack
from services.draft.settings import DraftSettings

MIB = 1 << 20
BEFORE = {"decode-0": (7, 1000 * MIB), "draft-0": (8, 600 * MIB)}


def problems(decode_mib: int, draft_mib: int) -> list[str]:
    after = {"decode-0": (7, decode_mib * MIB), "draft-0": (8, draft_mib * MIB), "prefill-1": (9, 5 * MIB)}
    return Leaks(0.0, {}, compare(BEFORE, after, 80 * MIB), 0, caches_were_full=True).problems()


def test_what_grows_is_named_and_a_drafter_may_fill_its_cache() -> None:
    assert problems(1049, 709) == []
    assert problems(1051, 600) == ["decode-0 grew by 5.1%, from 1000 to 1051 MiB"]
    assert problems(1000, 711) == ["draft-0 grew by 18.5%, from 600 to 711 MiB"]


def test_a_drafters_cache_is_as_large_as_its_settings_say() -> None:
    usual = DraftSettings.model_fields["kv_memory_gib"].default
    assert Stack(Path(), {}, [], "", "", {}).draft_cache_bytes == usual * (1 << 30)
    assert Stack(Path(), {"HEADRACE_KV_MEMORY_GIB": "0.5"}, [], "", "", {}).draft_cache_bytes == 1 << 29
