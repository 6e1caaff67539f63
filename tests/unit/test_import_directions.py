"""Imports go one way, so that a stage can be installed, understood and replaced alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Who may import whom, inside shared/ and from outside.
ALLOWED: dict[str, set[str]] = {
    "shared.protocol": set(),
    "shared.settings": set(),
    "shared.speculation": set(),
    "shared.telemetry": set(),
    "shared.models": {"shared.protocol"},
    "shared.bus": {"shared.protocol", "shared.telemetry"},
    "shared.transport": {"shared.protocol", "shared.telemetry", "shared.settings"},
    "shared.blocks": {"shared.protocol", "shared.telemetry", "shared.transport", "shared.settings"},
    "shared.engine": {"shared.protocol", "shared.models"},
    "shared.worker": {
        "shared.protocol",
        "shared.telemetry",
        "shared.settings",
        "shared.models",
        "shared.bus",
        "shared.transport",
        "shared.blocks",
        "shared.engine",
    },
}


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "shared" else set()
    return found


def ours(modules: set[str]) -> set[str]:
    return {".".join(m.split(".")[:2]) for m in modules if m.split(".")[0] in {"shared", "services", "loadgen"}} - {
        "shared"
    }


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_shared_packages_import_only_what_lies_below_them(package: str) -> None:
    place = ROOT / package.replace(".", "/")
    files = list(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    assert files
    for path in files:
        assert ours(imports_of(path)) <= ALLOWED[package] | {package}, path


def test_services_do_not_import_each_other() -> None:
    for path in (ROOT / "services").rglob("*.py"):
        package = ".".join(path.relative_to(ROOT).with_suffix("").parts[:2])
        assert {m for m in ours(imports_of(path)) if m.startswith("services.")} <= {package}, path


def test_the_load_generator_sees_only_the_protocol_and_what_it_measures() -> None:
    for path in (ROOT / "loadgen").rglob("*.py"):
        allowed = {"shared.protocol"}
        if path.name == "kv_bench.py":  # measures the KV plane itself
            allowed |= {"shared.transport", "shared.blocks"}
        if path.parent.name == "engine_bench" or path.name in ("acceptance.py", "gpu_bench.py", "gpu_mixer.py"):
            allowed |= {"shared.engine", "shared.models"}
        if path.parent.name == "spec_bench" and path.name == "peers.py":  # loads the same models
            allowed |= {"shared.models"}
        assert {m for m in ours(imports_of(path)) if not m.startswith("loadgen")} <= allowed, path


@pytest.mark.parametrize(
    "module", ["services.gateway.main", "services.kvstore.main", "services.draft.main", "shared.models"]
)
def test_services_without_a_model_import_no_torch(module: str) -> None:
    check = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT, timeout=60, check=False).returncode == 0
