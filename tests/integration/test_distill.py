"""`headrace distill` as a process: killed at any moment it goes on, and ends with the same draft."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from services.draft.distill.corpus import Corpus
from services.draft.distill.result import DistillReport, read_report
from shared.models import resolve_model
from shared.models.drafts import build_draft, read_head_tokens
from tests.unit.distill_harness import chat_target

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 2500

Running = subprocess.Popen[str]


HASTY = (
    "import sys; from services.draft.distill import command, corpus, training; "
    "corpus.SHARD_TEXTS = 2; training.CHECKPOINT_S = 0.0; sys.exit(command.main())"
)
"""The same program, but it writes down what it has after every few texts and after every step."""


def start(target: Path, out: Path, *more: str, program: Sequence[str] = ("-m", "services.draft.distill")) -> Running:
    options = ["--target", str(target), "--out", str(out), "--tokens", str(TOKENS), "--epochs", "3", "--seed", "4"]
    return subprocess.Popen(
        [sys.executable, *program, *options, *more],
        cwd=ROOT,
        env={**os.environ, "HEADRACE_CACHE_DIR": str(out.parent / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: Running) -> tuple[int, str, str]:
    said, complained = process.communicate(timeout=240)
    return process.returncode, said, complained


def comparable(report: DistillReport | None) -> dict[str, object]:
    assert report is not None
    return {
        name: getattr(report, name) for name in ("recipe", "texts", "steps", "parameters", "divergence", "accepted")
    }


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_target(tmp_path_factory.mktemp("distill") / "tiny")


@pytest.fixture(scope="module")
def undisturbed(target: Path) -> Path:
    out = target.parent / "undisturbed"
    status, said, complained = finish(start(target, out, "--pack", str(out.parent / "packed.safetensors")))
    assert status == 0, complained
    assert "the target writes text to learn from: " in said
    assert "the target writes text to be measured on: " in said
    assert "the student learns: " in said
    assert "held out, greedy " in said
    return out


def test_the_draft_is_a_model_that_guesses_better_than_it_began(target: Path, undisturbed: Path) -> None:
    report = read_report(undisturbed)
    assert report is not None
    assert report.recipe.corpus.fingerprint == resolve_model(str(target)).fingerprint
    assert report.accepted.greedy.positions > 50
    assert report.accepted.sampled.positions > 50
    assert (undisturbed.parent / "packed.safetensors").stat().st_size < 150_000
    assert resolve_model(str(undisturbed)).path == undisturbed
    begun = load_file(target / "model.safetensors")["model.layers.3.mlp.up_proj.weight"]
    trained = load_file(undisturbed / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    assert (begun - trained.float()).abs().max() > 1e-3


def test_killed_again_and_again_it_ends_with_the_same_draft(target: Path, undisturbed: Path) -> None:
    out = target.parent / "killed"
    kills = 0
    while kills < 4:
        process = start(target, out, program=("-c", HASTY))
        # The first kills strike while the target writes, the last while the student learns.
        give_up = time.monotonic() + 120
        before = _progress(out)
        while process.poll() is None and _progress(out) <= before and time.monotonic() < give_up:
            time.sleep(0.02)
        if process.poll() is not None:
            break
        process.kill()
        process.communicate()
        kills += 1
    assert kills >= 2
    assert finish(start(target, out))[0] == 0
    assert comparable(read_report(out)) == comparable(read_report(undisturbed))
    same = load_file(out / "model.safetensors")
    for name, weight in load_file(undisturbed / "model.safetensors").items():
        assert weight.equal(same[name]), name


def _progress(out: Path) -> tuple[int, int]:
    """Grows with every file that the run completes: (shards, writes of the checkpoint)."""
    work = out / "work"
    checkpoint = work / "training.safetensors"
    return len(list(work.glob("*/texts-*"))), checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0


def _learned(out: Path) -> tuple[list[tuple[str, int]], bytes]:
    """Texts and when they were written; the checkpoint, which tells the time that training took as well."""
    texts = sorted((str(path), path.stat().st_mtime_ns) for path in (out / "work").glob("*/texts-*"))
    return texts, (out / "work" / "training.safetensors").read_bytes()


def test_a_finished_draft_is_not_made_again(target: Path, undisturbed: Path) -> None:
    before = (undisturbed / "model.safetensors").stat().st_mtime_ns
    status, said, _ = finish(start(target, undisturbed))
    assert status == 0
    assert "held out, greedy " in said
    assert (undisturbed / "model.safetensors").stat().st_mtime_ns == before


def test_another_head_needs_no_training(target: Path, undisturbed: Path, tmp_path: Path) -> None:
    out, packed = tmp_path / "shorter", tmp_path / "packed.safetensors"
    subprocess.run(["cp", "-rp", undisturbed, out], check=True, timeout=20)
    whole, learned = load_file(out / "model.safetensors"), _learned(out)
    status, _, complained = finish(start(target, out, "--head-tokens", "40", "--pack", str(packed)))
    assert status == 0, complained
    assert _learned(out) == learned
    for name, weight in load_file(out / "model.safetensors").items():
        assert weight.equal(whole[name]), name
    kept = read_head_tokens(out)
    assert len(set(kept)) == 40
    report, before = read_report(out), read_report(undisturbed)
    assert report is not None
    assert before is not None
    assert (report.head_tokens, before.head_tokens) == (40, 8192)
    assert report.accepted.greedy.positions == before.accepted.greedy.positions
    assert 0 < report.accepted.greedy.share <= before.accepted.greedy.share, "it is measured as it will draft"
    (tmp_path / "built").mkdir()
    build_draft(packed, target, tmp_path / "built")
    assert read_head_tokens(tmp_path / "built") == kept
    made = (out / "model.safetensors").stat().st_mtime_ns
    assert finish(start(target, out, "--head-tokens", "40"))[0] == 0
    assert (out / "model.safetensors").stat().st_mtime_ns == made
    assert finish(start(target, out, "--head-tokens", "0"))[0] == 0
    assert read_head_tokens(out) == []
    assert _learned(out) == learned


def test_more_epochs_use_the_text_that_is_there(target: Path, undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "longer"
    subprocess.run(["cp", "-r", undisturbed, out], check=True, timeout=20)
    shards = sorted((out / "work" / "corpus").iterdir())
    status, _, complained = finish(start(target, out, "--epochs", "4"))
    assert status == 0, complained
    assert sorted((out / "work" / "corpus").iterdir()) == shards
    report, before = read_report(out), read_report(undisturbed)
    assert report is not None
    assert before is not None
    assert report.steps * 3 == before.steps * 4


def test_ctrl_c_keeps_what_was_done_and_says_how_to_go_on(target: Path, tmp_path: Path) -> None:
    process = start(target, tmp_path / "out", "--tokens", "2000000", program=("-c", HASTY))
    work = tmp_path / "out" / "work"
    give_up = time.monotonic() + 60
    while not list(work.glob("corpus/texts-*")) and time.monotonic() < give_up:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    status, _, complained = finish(process)
    assert status == 130, complained
    assert "the same command goes on from here" in complained


def test_two_runs_in_one_directory_are_refused(target: Path, undisturbed: Path, tmp_path: Path) -> None:
    first = start(target, tmp_path / "out", "--tokens", "2000000")
    try:
        give_up = time.monotonic() + 60
        while not list((tmp_path / "out").glob("work/corpus/recipe.json")) and time.monotonic() < give_up:
            time.sleep(0.05)
        status, _, complained = finish(start(target, tmp_path / "out"))
        assert status == 1
        assert complained.strip().startswith("headrace: another distillation works in ")
    finally:
        first.kill()
        first.communicate()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--layers", "4"], "has 4 layers; --layers must be at least 1 and less than that"),
        (["--seed", "5"], "holds text of another target, seed or prompts"),
        (["--prompts", "/nowhere"], "/nowhere cannot be read"),
        (["--target", "nobody"], "no model 'nobody'"),
    ],
)
def test_what_cannot_be_done_is_one_line(target: Path, undisturbed: Path, options: list[str], complaint: str) -> None:
    status, _, complained = finish(start(target, undisturbed, *options))
    assert status == 1
    assert complaint in complained
    assert len(complained.strip().splitlines()) == 1


def test_the_command_reaches_it_with_its_options(target: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("hello\n\nhow are you\nSTOP\nall\nhe\n")
    status, said, complained = finish(
        start(target, tmp_path / "out", "--prompts", str(tmp_path / "prompts"), "--tokens", "700",
              "--head-tokens", "33",
              program=("-m", "services.cli", "distill"))
    )  # fmt: skip
    assert status == 0, complained
    report = read_report(tmp_path / "out")
    assert report is not None
    assert report.recipe.tokens == 700
    assert report.recipe.corpus.seed == 4
    assert report.recipe.corpus.prompts_sha256
    assert report.texts > 0
    assert report.head_tokens == len(read_head_tokens(tmp_path / "out")) == 33
    corpus = Corpus(tmp_path / "out" / "work" / "corpus", report.recipe.corpus, itertools.count)
    assert corpus.num_made >= 700
    assert said
