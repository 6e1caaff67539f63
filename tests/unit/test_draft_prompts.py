"""The prompts that the shipped draft learned from: many, different, and none of them what the benchmark asks."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType

import pytest

from loadgen.spec_bench import workloads


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    path = Path(__file__).parents[2] / "infra" / "draft" / "prompts.py"
    spec = importlib.util.spec_from_file_location("draft_prompts", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_prompts_are_different_and_the_same_for_the_same_seed(recipe: ModuleType) -> None:
    made = list(recipe.prompts(3, 500))
    assert len(set(made)) == 500
    assert made == list(recipe.prompts(3, 500))
    assert made[:10] != list(recipe.prompts(4, 10))


def test_nothing_that_the_benchmark_asks_about_was_learned(recipe: ModuleType) -> None:
    text = "\n".join(recipe.prompts(recipe.SEED, recipe.COUNT))
    asked = itertools.chain(workloads._HEROES, workloads._DEEDS, workloads._PLACES, workloads._SUBJECTS)
    assert [part for part in asked if part in text] == []
