"""One trace per request across all services, also when a worker dies on the way."""

from __future__ import annotations

import openai

from tests.e2e.conftest import MODEL, Stack
from tests.integration.otlp_receiver import OtlpReceiver, ReceivedSpan, children, orphans

QUESTION = [{"role": "user", "content": "Explain in a few sentences what a headrace is and where it leads."}]


def of_request(spans: list[ReceivedSpan], request_id: str) -> list[ReceivedSpan]:
    return [span for span in spans if span.attributes.get("headrace.request_id") == request_id]


def trace_of(
    otlp: OtlpReceiver, request_id: str, decodes: int, names: frozenset[str] = frozenset()
) -> list[ReceivedSpan]:
    """The request's whole trace, once its root and all its decode spans came."""

    def complete(spans: list[ReceivedSpan]) -> bool:
        mine = of_request(spans, request_id)
        gateway_came = any(s.service.endswith("gateway") for s in mine)
        return gateway_came and sum(s.name == "decode" for s in mine) >= decodes and names <= {s.name for s in mine}

    spans = otlp.wait_for(complete, timeout_s=60)
    return otlp.trace(of_request(spans, request_id)[0].trace_id)


def test_a_request_is_one_tree_over_all_services(stack: Stack, otlp: OtlpReceiver) -> None:
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=120)
    repeating = [{"role": "user", "content": "Say the words: " + "the miller and the wheel and " * 12}]
    answer = client.chat.completions.create(
        model=MODEL, messages=repeating, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
    )
    spans = trace_of(otlp, answer.id, decodes=1, names=frozenset({"draft"}))
    assert orphans(spans) == []
    (root,) = [span for span in spans if not span.parent_id]
    assert root.attributes["gen_ai.request.model"] == MODEL
    names = {span.name for span in spans}
    assert {"queue.prefill", "prefill", "prefill.chunk", "kv.put", "queue.decode", "kv.get", "decode"} <= names
    (prefill,) = [span for span in spans if span.name == "prefill"]
    assert {"prefill.chunk", "kv.put"} <= {span.name for span in children(spans, prefill)}
    (decode,) = [span for span in spans if span.name == "decode"]
    assert "draft" in {span.name for span in children(spans, decode)}
    assert decode.attributes["gen_ai.usage.output_tokens"] == 12
    assert decode.attributes["headrace.decode.steps"] >= 1
    assert {span.instance for span in spans} >= {"gateway-0", "prefill-0", "decode-0"}
    assert not any("headrace is" in str(value) for span in spans for value in span.attributes.values())


def test_the_tree_holds_after_a_redelivery(stack: Stack, otlp: OtlpReceiver) -> None:
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=120)
    request_id, victim = "", stack.pid_of("decode-0")
    for number, chunk in enumerate(
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            max_tokens=120,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
    ):
        request_id = chunk.id
        if number == 10:
            stack.kill_9(victim)
    spans = trace_of(otlp, request_id, decodes=1)
    (decode,) = [span for span in spans if span.name == "decode"]  # the killed worker's span died with it
    assert decode.attributes["headrace.decode.resumed_tokens"] > 0
    assert decode.attributes["headrace.epoch"] == 3
    redelivered = [s for s in spans if s.name == "queue.decode" and s.attributes["headrace.delivery"] > 1]
    assert redelivered
    (root,) = [span for span in spans if not span.parent_id]
    assert {span.trace_id for span in spans} == {root.trace_id}
