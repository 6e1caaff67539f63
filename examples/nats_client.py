"""A client without HTTP: submits a request over NATS and prints the answer as it comes.

It needs nats-py and nothing of Headrace, to show that the protocol is open (docs/protocol.md). Against `headrace up`:

    python examples/nats_client.py "Why is the sky blue?"
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import TimeoutError as NothingCame

SILENCE_S = 1.0
CONNECT_S = 5.0


async def connect(url: str) -> Client:
    """By itself the client would try for ever."""
    try:
        async with asyncio.timeout(CONNECT_S):
            return await nats.connect(url)
    except TimeoutError:
        sys.exit("no NATS server answers; start one with `headrace up`, or name it with --nats")


async def submit(client: Client, body: dict[str, Any], key: str) -> dict[str, Any]:
    """Ask for an answer. Once this returns, the request is stored and will be served or ended."""
    headers = {"Authorization": f"Bearer {key}"} if key else None
    reply = await client.request("hr.submit", json.dumps(body).encode(), timeout=10, headers=headers)
    accepted: dict[str, Any] = json.loads(reply.data)
    if "error" in accepted:
        sys.exit(f"refused: {accepted['error']['message']}")
    return accepted


async def history(client: Client, log_subject: str, after: int) -> list[Msg]:
    """The stored records behind a sequence, one direct get each."""
    records: list[Msg] = []
    while True:
        query = json.dumps({"seq": after + 1, "next_by_subj": log_subject}).encode()
        record = await client.request("$JS.API.DIRECT.GET.HR_LOG", query, timeout=5)
        if (record.headers or {}).get("Status") == "404":
            return records
        records.append(record)
        after = sequence(record)


def sequence(record: Msg) -> int:
    return int((record.headers or {})["Nats-Sequence"])


async def follow(client: Client, accepted: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Every record of the log, once and in order: live ones as they come, and history wherever one might be missing."""
    live = await client.subscribe(accepted["live_subject"])
    last = 0
    records = await history(client, accepted["log_subject"], last)
    while True:
        for record in records:
            last = sequence(record)
            content = json.loads(record.data)
            yield content
            if content["type"] == "end":
                await live.unsubscribe()
                return
        try:
            record = await live.next_msg(timeout=SILENCE_S)
        except NothingCame:
            records = await history(client, accepted["log_subject"], last)
            continue
        if sequence(record) <= last:
            records = []
        elif int((record.headers or {})["Nats-Last-Sequence"]) == last:
            records = [record]
        else:
            records = await history(client, accepted["log_subject"], last)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt")
    parser.add_argument("--nats", default=os.environ.get("HEADRACE_NATS_URL", "nats://127.0.0.1:4222"))
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--key", default="", help="an API key, where the gateways ask for one")
    parser.add_argument("--max-tokens", type=int, default=200)
    arguments = parser.parse_args()

    client = await connect(arguments.nats)
    messages = [{"role": "user", "content": arguments.prompt}]
    body = {"model": arguments.model, "messages": messages, "max_tokens": arguments.max_tokens}
    accepted = await submit(client, body, arguments.key)
    print(f"request {accepted['request_id']}, seed {accepted['seed']}", file=sys.stderr)
    async for record in follow(client, accepted):
        match record["type"]:
            case "claim":
                print(f"[{record['stage']} worker {record['worker']}]", file=sys.stderr)
            case "tokens":
                print(record["text"], end="", flush=True)
            case "end":
                usage = record["usage"]
                print(f"\n{record['reason']}: {usage['completion_tokens']} tokens", file=sys.stderr)
    await client.close()


if __name__ == "__main__":
    asyncio.run(main())
