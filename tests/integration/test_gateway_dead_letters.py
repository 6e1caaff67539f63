"""A dead letter is queued again on request: the same work under a new id, once."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import msgspec
import pytest

from shared.bus import Bus
from shared.protocol.jobs import GenerationRequest, SamplingParams
from shared.protocol.records import Accepted
from shared.protocol.streams import DEAD, REQUESTS
from shared.protocol.subjects import RETRY, dead_subject
from tests.conftest import NatsServer
from tests.integration.gateway_harness import (
    PATIENCE_S,
    GatewayProcess,
    Start,
    Worker,
    ended_of,
    entries_of,
    fresh_seed,
)


def given_up(model: str = "tiny") -> GenerationRequest:
    """A request with everything set that decides its output."""
    now, seed = time.time() - 500, fresh_seed()
    return GenerationRequest(
        request_id=f"chatcmpl-dead{seed}",
        tenant="acme.corp",
        model=model,
        api="chat",
        priority="high",
        prompt_ids=[5, 6, 7],
        params=SamplingParams(
            max_tokens=9, seed=seed, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, stop=["x"], stop_token_ids=[4],
            ignore_eos=True, presence_penalty=0.1, frequency_penalty=0.2, repetition_penalty=1.1,
            logit_bias={3: 1.5}, min_tokens=2, logprobs=2,
        ),
        created_unix_s=now,
        queue_deadline_unix_s=now + 40,
        deadline_unix_s=now + 110,
        log_seq=77,
        compute_timeout_s=70,
        salt="acme.corp",
        speculation="off",
        prediction_ids=[8, 9],
    )  # fmt: skip


async def bury(bus: Bus, request: GenerationRequest) -> int:
    """Its sequence among the dead letters."""
    await bus.bury("decode", request, "worker_crashed", ["decode-0.a", "decode-0.b"])
    subject = dead_subject("decode", request.tenant, request.request_id)
    return (await bus.js.get_last_msg(DEAD.name, subject)).seq or 0


async def retry(bus: Bus, asked: Any) -> dict[str, Any]:
    reply = await bus.client.request(RETRY, json.dumps(asked).encode(), timeout=PATIENCE_S)
    answer: dict[str, Any] = json.loads(reply.data)
    return answer


async def test_a_dead_letter_runs_again_with_the_same_work_under_a_new_id(
    first: GatewayProcess, worker: Worker, bus: Bus
) -> None:
    lost = given_up()
    seq = await bury(bus, lost)
    answer = await retry(bus, {"seq": seq})
    assert answer["request_id"] != lost.request_id
    assert answer["tenant"] == "acme.corp"
    assert answer["log_subject"] == f"hr.tok.acme=2e=corp.{answer['request_id']}"
    assert answer["live_subject"] == f"hr.live.acme=2e=corp.{answer['request_id']}"
    assert (await ended_of(bus, answer["request_id"], "acme.corp")).reason == "stop"
    (again,) = [request for request in worker.seen if request.request_id == answer["request_id"]]
    accepted = (await entries_of(bus, answer["request_id"], "acme.corp"))[0].record
    assert isinstance(accepted, Accepted)
    for name in ("tenant", "model", "api", "priority", "prompt_ids", "params", "salt", "speculation", "prediction_ids"):
        assert getattr(again, name) == getattr(lost, name), name
    assert accepted.logprobs == 2
    # Its time begins anew, and as much of it.
    assert abs(again.created_unix_s - time.time()) < PATIENCE_S
    assert again.queue_deadline_unix_s - again.created_unix_s == pytest.approx(40)
    assert again.compute_timeout_s == accepted.compute_timeout_s == 70
    assert again.deadline_unix_s - again.created_unix_s == pytest.approx(110)
    assert (await retry(bus, {"seq": seq}))["error"]["status"] == 404


async def test_of_two_operators_who_retry_a_letter_at_once_both_get_the_same_run(
    first: GatewayProcess, second: GatewayProcess, worker: Worker, bus: Bus
) -> None:
    lost = given_up()
    seq = await bury(bus, lost)
    answers = await asyncio.gather(*(retry(bus, {"seq": seq}) for _ in range(6)))
    runs = {answer["request_id"] for answer in answers if "error" not in answer}
    assert len(runs) == 1
    assert {answer["error"]["status"] for answer in answers if "error" in answer} <= {404}
    assert [request.params.seed for request in worker.seen].count(lost.params.seed) == 1


async def test_a_letter_of_another_model_is_for_that_models_gateway(
    first: GatewayProcess, deserted: GatewayProcess, bus: Bus
) -> None:
    lost = given_up("deserted")
    seq = await bury(bus, msgspec.structs.replace(lost, queue_deadline_unix_s=lost.created_unix_s + 1))
    answer = await retry(bus, {"seq": seq})
    assert answer["model"] == "deserted"
    # Nobody serves it, and nothing of it may wait when the next test looks at the queues.
    ended = await ended_of(bus, answer["request_id"], "acme.corp")
    assert ended.error is not None
    assert ended.error.code == "queue_timeout"
    nobodys = await bury(bus, given_up("nobody-serves-this"))
    assert (await retry(bus, {"seq": nobodys}))["error"]["code"] == "model_not_found"


async def test_what_the_queue_refuses_stays_a_dead_letter_and_can_be_retried_later(
    own_nats: NatsServer, start: Start
) -> None:
    gateway = start(url=own_nats.url, max_queued_high="1")
    async with await Bus.connect(own_nats.url, name="test") as bus, Worker.running(own_nats.url, "tiny"):
        seq = await bury(bus, given_up())
        filler = "hr.req.other.high.default.filler"
        await bus.js.publish(filler, b"")
        refused = await retry(bus, {"seq": seq})
        assert (refused["error"]["status"], refused["error"]["code"]) == (503, "queue_full")
        assert refused["error"]["retry_after_s"] >= 1
        await bus.js.purge_stream(REQUESTS["high"].name, subject=filler)
        async with asyncio.timeout(PATIENCE_S):
            while "error" in (answer := await retry(bus, {"seq": seq})):
                assert answer["error"]["code"] == "queue_full"
        assert (await ended_of(bus, answer["request_id"], "acme.corp")).reason == "stop"
        assert (await bus.js.stream_info(DEAD.name)).state.messages == 0
    assert gateway.stop() == 0


async def test_what_is_no_letter_is_refused_by_name(first: GatewayProcess, bus: Bus) -> None:
    await bus.bury_raw("hr.dead.prefill.unreadable", b"\x93not a request", "unreadable")
    unreadable = (await bus.js.get_last_msg(DEAD.name, "hr.dead.prefill.unreadable")).seq
    for asked, status, code in (
        ({"seq": unreadable}, 422, "dead_letter_unreadable"),
        ({"seq": 10**9}, 404, "not_found"),
        ({"seq": 0}, 400, "invalid_value"),
        ({"seq": True}, 400, "invalid_value"),
        ({"seq": 2**70}, 400, "invalid_value"),
        ({}, 400, "invalid_value"),
        ([], 400, "invalid_json"),
    ):
        error = (await retry(bus, asked))["error"]
        assert (error["status"], error["code"]) == (status, code), asked
