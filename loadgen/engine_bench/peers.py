"""One request at a time, from prompt to last token, on the engine and on what others would use for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

from loadgen.engine_bench import llama_peer
from loadgen.engine_bench.plan import Plan
from loadgen.engine_bench.section import Line, Section
from loadgen.engine_bench.subjects import PACKED, Subjects
from shared.engine.config import Dtype
from shared.protocol.jobs import SamplingParams

PROMPT_TOKENS = 256
NEW_TOKENS = 32
LLAMA_THREADS = (1, 2)

Generate = Callable[[list[int], int], list[float]]
"""(prompt, number of new tokens) -> when each of them arrived, on the `perf_counter` clock."""


def measure(subjects: Subjects, plan: Plan) -> Section:
    ids = subjects.prose[:PROMPT_TOKENS]
    peers: dict[str, Generate] = {dtype: partial(_engine_generate, subjects, dtype) for dtype in PACKED}
    peers["TF generate"] = subjects.transformers.generate
    threads = dict.fromkeys(peers, subjects.threads)
    llamas, note = _llama_peers(plan)
    for count, llama in llamas.items():
        peers[f"llama.cpp, {count}"] = llama.generate
        threads[f"llama.cpp, {count}"] = count
    prefill: dict[str, list[float]] = {name: [] for name in peers}
    decode: dict[str, list[float]] = {name: [] for name in peers}
    for generate in peers.values():
        generate(ids, 2)  # first touches of memory
    for _ in range(plan.long_rounds):
        for name, generate in peers.items():
            began_s = time.perf_counter()
            arrivals = generate(ids, NEW_TOKENS)
            prefill[name].append(len(ids) / (arrivals[0] - began_s))
            decode[name].append((NEW_TOKENS - 1) / (arrivals[-1] - arrivals[0]))
    lines = [
        Line("threads", "", [str(threads[name]) for name in peers]),
        Line("prefill, until the first token", "tokens/s", [median(prefill[name]) for name in peers]),
        Line("decode", "tokens/s", [median(decode[name]) for name in peers]),
    ]
    title = f"one request, {len(ids)} + {NEW_TOKENS} tokens, wall"
    return Section("peers", title, list(peers), lines, [note])


def _engine_generate(subjects: Subjects, dtype: Dtype, ids: list[int], new_tokens: int) -> list[float]:
    engine = subjects.engine(dtype)
    params = SamplingParams(max_tokens=new_tokens, seed=1, temperature=0.0, ignore_eos=True)
    engine.start(engine.new_sequence("only", ids, len(ids), params, speculate=False))
    arrivals: list[float] = []
    while engine.has_work:
        for step in engine.step():
            arrivals += [time.perf_counter()] * len(step.new_ids)
    return arrivals


def _llama_peers(plan: Plan) -> tuple[dict[int, llama_peer.LlamaPeer], str]:
    """By thread count, and what to say about them."""
    if not llama_peer.is_installed():
        return {}, "llama-cpp-python: not installed."
    if plan.gguf is None:
        return {}, "llama-cpp-python is installed; name a GGUF file of the same model with --gguf to compare."
    context = PROMPT_TOKENS + NEW_TOKENS
    try:
        found = {n: llama_peer.LlamaPeer(plan.gguf, n, context) for n in LLAMA_THREADS}
    except ValueError as error:
        return {}, f"llama-cpp-python {llama_peer.version()} cannot load the GGUF file: {error}"
    return found, f"llama-cpp-python {llama_peer.version()}, {plan.gguf.name}."
