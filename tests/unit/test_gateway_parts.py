"""The gateway's smaller parts: keys, terms, deadlines, errors, prompts, the follower's mailbox."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from copy import copy
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

from services.gateway import follow
from services.gateway.auth import Keyring
from services.gateway.call import GenerationCall
from services.gateway.deadlines import Deadlines, overdue_error
from services.gateway.errors import ApiError, failure_of, from_info
from services.gateway.follow import ClientGone, FollowedLog, Follower
from services.gateway.limits import Limits
from services.gateway.openai_schema import parse_call
from services.gateway.prompts import INLINE_CHARS, Prompter
from services.gateway.settings import load_settings, parse_api_keys
from services.gateway.terms import keyed_request_id, new_request_id, parse_terms
from shared.bus import Bus, LogEntry
from shared.models import ChatTokenizer
from shared.protocol.records import Claimed, Ended, ErrorInfo, Tokens, Usage
from shared.protocol.status import InstanceStatus
from tests.integration.gateway_harness import make_model

keys = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=","), min_size=1, max_size=20)
tenants = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=20)


# Limits


def test_more_answers_than_could_ever_fit_are_a_400_that_names_the_field() -> None:
    def limits(**settings: int) -> Limits:
        return Limits(cast(Bus, None), "m", load_settings(**settings))

    limits(max_queued_high=1).check_size(8, 4, "low")
    limits(max_concurrent=2).check_choices(3, 1, followed=False)
    for refused, param in (
        (lambda: limits(max_queued_low=2).check_size(3, 1, "low"), "n"),
        (lambda: limits(max_queued_low=2).check_size(1, 3, "low"), "prompt"),
        (lambda: limits(max_tenant_unfinished=2).check_size(3, 1, "low"), "n"),
        (lambda: limits(max_concurrent=2).check_choices(3, 1, followed=True), "n"),
    ):
        with pytest.raises(ApiError) as caught:
            refused()
        assert (caught.value.status, caught.value.param) == (400, param)


# Keys


@given(st.dictionaries(keys.filter(lambda key: not key.startswith("{")), tenants, min_size=1, max_size=5))
def test_a_list_of_keys_is_read_back_even_when_keys_hold_equals_signs(wanted: dict[str, str]) -> None:
    assert parse_api_keys(",".join(f"{key}={tenant}" for key, tenant in wanted.items())) == wanted


@pytest.mark.parametrize("text", ["sk-1", "=t", "sk-1=", '{"a": 1}', '{"a"', "sk 1=t", f"sk-1={'t' * 65}"])
def test_bad_keys_are_refused_without_quoting_them(text: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse_api_keys(text)
    assert "sk-1" not in str(caught.value)
    with pytest.raises(ValueError, match="api_keys") as caught:
        load_settings(api_keys=text)
    assert "sk-1" not in str(caught.value)


def test_settings_do_not_show_their_keys() -> None:
    settings = load_settings(api_keys="sk-1=t")
    assert "sk-1" not in f"{settings!r} {settings.model_dump_json()}"
    assert settings.tenants_by_key == {"sk-1": "t"}


@given(st.none() | st.text(max_size=30))
def test_a_keyring_lets_in_known_keys_only(header: str | None) -> None:
    assert Keyring({}).tenant(header) == "default"
    ring = Keyring({"k": "acme"})
    assert ring.tenant("bearer k") == "acme"
    if (header or "").split() not in (["bearer", "k"], ["Bearer", "k"]):
        with pytest.raises(ApiError) as caught:
            ring.tenant(header)
        assert caught.value.status == 401


# Terms


def call_with(**fields: Any) -> GenerationCall:
    return parse_call({"model": "m", "prompt": "x", **fields}, "completion")


def test_time_outs_are_bounded_by_the_gateway_and_do_not_shorten_each_other() -> None:
    settings = load_settings(timeout_s=10, queue_timeout_s=5, max_timeout_s=20)
    terms = parse_terms({}, call_with(), settings)
    assert (terms.timeout_s, terms.queue_timeout_s) == (10, 5)
    headers = {"x-headrace-timeout-s": "9999", "x-headrace-queue-timeout-s": "1e9"}
    terms = parse_terms(headers, call_with(), settings)
    assert (terms.timeout_s, terms.queue_timeout_s) == (20, 20)
    terms = parse_terms({"x-headrace-timeout-s": "2"}, call_with(), settings)
    assert (terms.timeout_s, terms.queue_timeout_s) == (2, 5)


def test_time_outs_in_the_body_count_where_no_header_says_otherwise() -> None:
    settings = load_settings(max_timeout_s=20)
    call = call_with(timeout_s=3, queue_timeout_s=0.5)
    terms = parse_terms({}, call, settings)
    assert (terms.timeout_s, terms.queue_timeout_s) == (3, 0.5)
    terms = parse_terms({"x-headrace-timeout-s": "4"}, call, settings)
    assert (terms.timeout_s, terms.queue_timeout_s) == (4, 0.5)
    assert parse_terms({}, call_with(timeout_s=99), settings).timeout_s == 20


@pytest.mark.parametrize("field", ["timeout_s", "queue_timeout_s"])
@pytest.mark.parametrize("value", [0, -1, "5", True, [], math.inf])
def test_a_time_out_in_the_body_that_is_not_a_positive_number_is_a_400(field: str, value: object) -> None:
    with pytest.raises(ApiError) as caught:
        call_with(**{field: value})
    assert (caught.value.status, caught.value.param) == (400, field)


def test_time_outs_and_background_do_not_make_another_body_for_an_idempotency_key() -> None:
    plain = call_with()
    assert call_with(timeout_s=3, queue_timeout_s=2, background=True).digest == plain.digest
    assert call_with(max_tokens=3).digest != plain.digest


@pytest.mark.parametrize("text", ["", "soon", "-1", "0", "nan", "inf", "-inf", "1,5", "0x10"])
def test_a_time_out_that_is_not_a_positive_number_is_a_400(text: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_terms({"x-headrace-timeout-s": text}, call_with(timeout_s=1), load_settings())
    assert (caught.value.status, caught.value.param) == (400, "x-headrace-timeout-s")


def test_request_ids_look_like_openais_and_keys_do_not_collide() -> None:
    assert len(new_request_id("chat")) == len("chatcmpl-") + 24
    assert len(new_request_id("completion")) == len("cmpl-") + 24
    ids = {
        keyed_request_id(api, tenant, key, attempt)
        for api in ("chat", "completion")
        for tenant in ("a", "b", "a\0b")
        for key in ("k", "b\0k")
        for attempt in (0, 1)
        if "\0" not in tenant + key  # header values and tenants cannot hold it
    }
    assert len(ids) == 8


# Deadlines and errors


def test_deadlines_pass_in_order() -> None:
    deadlines = Deadlines(latest_unix_s=10, queue_unix_s=5)
    assert [deadlines.overdue(now) for now in (4, 5, 9, 10)] == [None, "queue", "queue", "total"]
    assert deadlines.next_unix_s() == 5
    deadlines.queue_unix_s = None
    assert (deadlines.overdue(9), deadlines.next_unix_s()) == (None, 10)


def test_the_error_of_a_deadline_says_what_is_missing() -> None:
    busy = InstanceStatus("decode", "d", "d.1", 1, "h", 0, 0, state="ready")
    assert "no prefill worker is running" in overdue_error("queue", "prefill", [], 3).message
    assert "all 1 decode workers are busy" in overdue_error("queue", "decode", [busy], 3).message
    assert overdue_error("total", "decode", [busy], 3).code == "deadline_exceeded"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ErrorInfo("m", code="queue_timeout"), 503),
        (ErrorInfo("m", code="deadline_exceeded"), 503),
        (ErrorInfo("m", code="cancelled"), 499),
        (ErrorInfo("m", type="invalid_request_error", code="context_length_exceeded"), 400),
        (ErrorInfo("m", type="invalid_request_error", code="request_too_large"), 413),
        (ErrorInfo("m", type="invalid_request_error", code="another"), 400),
        (ErrorInfo("m", code="queue_full"), 503),
        (ErrorInfo("m", code="queue_unavailable"), 503),
        (ErrorInfo("m", code="gateway_stopping"), 503),
        (ErrorInfo("m", code="log_unreachable"), 503),
        (ErrorInfo("m", code="engine_failed"), 500),
        (ErrorInfo("m"), 500),
    ],
)
def test_a_logged_error_has_one_http_status(error: ErrorInfo, status: int) -> None:
    answer = from_info(error, 7)
    assert answer.status == status
    assert answer.headers.get("Retry-After") == ("7" if status == 503 else None)


def test_every_terminal_record_is_an_answer_or_a_failure() -> None:
    usage = Usage(1, 1)
    assert failure_of(Ended(1, "stop", usage)) is None
    assert failure_of(Ended(1, "length", usage)) is None
    cancelled, failed = failure_of(Ended(1, "cancelled", usage)), failure_of(Ended(1, "error", usage))
    assert cancelled is not None
    assert failed is not None
    assert (cancelled.code, failed.code) == ("cancelled", "internal_error")


# Prompts


@pytest.fixture(scope="module")
def prompter(tmp_path_factory: pytest.TempPathFactory) -> Prompter:
    path: Path = make_model(tmp_path_factory.mktemp("model") / "tiny", context_length=20_000)
    return Prompter(ChatTokenizer.load(path))


async def test_long_prompts_are_tokenized_in_a_thread_to_the_same_ids(prompter: Prompter) -> None:
    for length in (INLINE_CHARS, INLINE_CHARS + 1):
        text = ("abcé" * length)[:length]
        call = parse_call({"model": "m", "prompt": text}, "completion")
        assert [len(ids) for ids in await prompter.token_ids(call)] == [len(text.encode())]
        chat = parse_call({"model": "m", "messages": [{"role": "user", "content": text}]}, "chat")
        assert [len(ids) for ids in await prompter.token_ids(chat)] == [len(f"u:{text}\na:".encode())]
        several = parse_call({"model": "m", "prompt": [text, "ab"]}, "completion")
        assert [len(ids) for ids in await prompter.token_ids(several)] == [len(text.encode()), 2]


async def test_a_leading_marker_is_added_to_text_and_left_to_the_template_in_chats(tmp_path: Path) -> None:
    path = make_model(tmp_path / "tiny")
    raw = Tokenizer.from_file(str(path / "tokenizer.json"))
    raw.post_processor = processors.TemplateProcessing(single="<|im_end|> $A", special_tokens=[("<|im_end|>", 0)])
    raw.save(str(path / "tokenizer.json"))
    prompter = Prompter(ChatTokenizer.load(path))
    text = parse_call({"model": "m", "prompt": "x"}, "completion")
    chat = parse_call({"model": "m", "messages": [{"role": "user", "content": "x"}]}, "chat")
    assert (await prompter.token_ids(text))[0][0] == 0
    assert (await prompter.token_ids(chat))[0][0] != 0


async def test_the_output_limit_fits_the_context(prompter: Prompter) -> None:
    chat = parse_call({"model": "m", "messages": [{"role": "user", "content": "x"}]}, "chat")
    assert prompter.output_limit(chat, 100, 512) == 512
    assert prompter.output_limit(chat, 19_990, 512) == 10
    text = parse_call({"model": "m", "prompt": "x"}, "completion")
    assert prompter.output_limit(text, 100, 512) == 16
    for asked, prompt_tokens in ((11, 19_990), (None, 20_000)):
        call = parse_call({"model": "m", "prompt": "x", "max_tokens": asked}, "completion")
        with pytest.raises(ApiError) as caught:
            prompter.output_limit(call, prompt_tokens, 512)
        assert caught.value.code == "context_length_exceeded"


# Following


class Followed:
    """A follower with its log, client and clock in the test's hand."""

    def __init__(self, deadlines: Deadlines | None = None, idle_s: float = 30.0, choices: int = 1) -> None:
        deadlines = deadlines or Deadlines(time.time() + 60)
        self.logs: list[asyncio.Queue[LogEntry]] = [asyncio.Queue() for _ in range(choices)]
        self.log = self.logs[0]
        self.gone = asyncio.Event()
        self.stopping = asyncio.Event()
        self.overdue: asyncio.Queue[tuple[int, str, bool]] = asyncio.Queue()
        self.follower = Follower(
            {choice: FollowedLog(self._entries(choice), copy(deadlines)) for choice in range(choices)},
            on_overdue=lambda *told: self.overdue.put_nowait(told),
            client_gone=self._client_gone,
            stopping=self.stopping,
            idle_s=idle_s,
            retry_after_s=7,
        )

    async def _entries(self, choice: int) -> AsyncIterator[LogEntry]:
        while not isinstance((entry := await self.logs[choice].get()).record, Ended):
            yield entry
        yield entry

    async def _client_gone(self) -> None:
        await self.gone.wait()


END = LogEntry(9, Ended(1, "stop", Usage(1, 1)))


async def test_a_follower_passes_on_every_entry_and_ends_with_the_log() -> None:
    case = Followed()
    wanted = [LogEntry(n, Tokens(1, n, [n], "x")) for n in range(600)] + [END]
    for entry in wanted:
        case.log.put_nowait(entry)
    async with case.follower as follower:
        assert [found async for found in follower] == [(0, entry) for entry in wanted]


async def test_a_follower_of_several_logs_passes_on_each_in_order_and_ends_with_the_last() -> None:
    case = Followed(choices=3)
    logs = [[LogEntry(n, Tokens(1, n, [n], "x")) for n in range(200 * c)] + [END] for c in range(3)]
    for queue, log in zip(case.logs, logs, strict=True):
        for entry in log:
            queue.put_nowait(entry)
    seen: list[list[LogEntry]] = [[], [], []]
    async with asyncio.timeout(10), case.follower as follower:
        async for found in follower:
            assert found is not None
            seen[found[0]].append(found[1])
    assert seen == logs


async def test_a_follower_ends_behind_the_first_failure() -> None:
    case = Followed(choices=2)
    failed = LogEntry(5, Ended(1, "error", Usage(1, 1)))
    case.logs[1].put_nowait(failed)
    async with asyncio.timeout(10), case.follower as follower:
        assert [found async for found in follower] == [(1, failed)]


async def test_a_follower_notices_the_client_and_the_gateways_stop() -> None:
    gone = Followed()
    async with gone.follower as follower:
        gone.gone.set()
        with pytest.raises(ClientGone):
            await anext(aiter(follower))
    stopped = Followed()
    async with stopped.follower as follower:
        stopped.stopping.set()
        with pytest.raises(ApiError) as caught:
            await anext(aiter(follower))
    assert (caught.value.code, caught.value.headers) == ("gateway_stopping", {"Retry-After": "1"})


async def test_an_idle_follower_says_so() -> None:
    case = Followed(idle_s=0.01)
    async with case.follower as follower:
        assert await anext(aiter(follower)) is None


async def test_a_claim_ends_the_queue_deadline_but_not_the_total_one() -> None:
    now = time.time()
    case = Followed(Deadlines(now + 0.3, now + 0.1))
    case.log.put_nowait(LogEntry(1, Claimed(1, "prefill", "w", 0)))
    case.log.put_nowait(LogEntry(2, Tokens(1, 0, [1], "x")))
    async with asyncio.timeout(10), case.follower:
        assert await case.overdue.get() == (0, "total", True)


async def test_compute_time_counts_from_the_first_claim_of_each_choice() -> None:
    now = time.time()
    case = Followed(Deadlines(now + 60, now + 60, compute_timeout_s=10), choices=3)
    case.logs[1].put_nowait(LogEntry(1, Claimed(1, "prefill", "w", now - 9.9)))
    case.logs[1].put_nowait(LogEntry(2, Claimed(2, "decode", "v", now)))
    case.logs[2].put_nowait(LogEntry(1, Claimed(1, "prefill", "w", now - 20)))
    async with asyncio.timeout(10), case.follower:
        assert [await case.overdue.get() for _ in range(2)] == [(2, "total", False), (1, "total", False)]
        await asyncio.sleep(0.05)
    assert case.overdue.empty()


async def test_a_log_that_does_not_end_after_its_deadline_counts_as_out_of_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(follow, "ENDING_S", 0.05)
    case = Followed(Deadlines(time.time() + 0.05))
    async with asyncio.timeout(10), case.follower as follower:
        with pytest.raises(ApiError) as caught:
            async for _ in follower:
                pass
    assert (caught.value.status, caught.value.code) == (503, "log_unreachable")
    assert caught.value.headers == {"Retry-After": "7"}
    assert case.overdue.qsize() == 1


async def test_an_unclaimed_request_passes_both_deadlines_once_each() -> None:
    now = time.time()
    case = Followed(Deadlines(now + 0.2, now + 0.1))
    async with asyncio.timeout(10), case.follower:
        assert await case.overdue.get() == (0, "queue", False)
        assert await case.overdue.get() == (0, "total", False)
        await asyncio.sleep(0.05)
    assert case.overdue.empty()


async def test_each_choice_has_the_deadlines_that_its_own_state_calls_for() -> None:
    now = time.time()
    case = Followed(Deadlines(now + 0.6, now + 0.3), choices=3)
    case.logs[0].put_nowait(LogEntry(1, Claimed(1, "prefill", "w", 0)))
    case.logs[2].put_nowait(END)
    async with asyncio.timeout(10), case.follower:
        assert await case.overdue.get() == (1, "queue", False)
        assert [await case.overdue.get() for _ in range(2)] == [(0, "total", False), (1, "total", False)]
        await asyncio.sleep(0.05)
    assert case.overdue.empty()
