"""Follows all requests of all tenants: one line when a request is accepted, claimed or ended, never its text.

It needs nats-py and nothing of Headrace. Against `headrace up`:

    python examples/nats_audit.py
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from dataclasses import dataclass

import nats
from nats.aio.msg import Msg


@dataclass
class Running:
    """A request that has not ended: when it was accepted, and the sequence of its latest record."""

    accepted_unix_s: float
    last: int
    tokens: int = 0
    missed: int = 0


class Audit:
    """Keeps the requests that run, and notices when a live record was missed."""

    def __init__(self) -> None:
        self.running: dict[str, Running] = {}

    async def on_record(self, message: Msg) -> None:
        headers = message.headers or {}
        seq, previous = int(headers["Nats-Sequence"]), int(headers["Nats-Last-Sequence"])
        tenant, request = message.subject.split(".")[2:]
        record = json.loads(message.data)
        state = self.running.setdefault(request, Running(record.get("created_unix_s", time.time()), previous))
        if previous != state.last:
            state.missed += 1
        state.last = seq
        match record["type"]:
            case "accepted":
                details = f"model={record['model']} prompt_tokens={record['prompt_tokens']} seed={record['seed']}"
            case "claim":
                details = f"stage={record['stage']} worker={record['worker']} epoch={record['epoch']}"
            case "hand_back":
                details = f"stage={record['stage']} worker={record['worker']} epoch={record['epoch']}"
            case "tokens":
                state.tokens += len(record["ids"])
                return
            case "end":
                took_s = time.time() - state.accepted_unix_s
                details = f"reason={record['reason']} tokens={state.tokens} took_s={took_s:.2f} missed={state.missed}"
                del self.running[request]
            case other:
                details = f"unknown record {other!r}"
        print(f"{seq:>8} {tenant} {request} {record['type']:<9} {details}", flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nats", default="nats://127.0.0.1:4222")
    arguments = parser.parse_args()
    client = await nats.connect(arguments.nats, max_reconnect_attempts=-1)
    await client.subscribe("hr.live.>", cb=Audit().on_record)
    await client.flush()
    print("listening on hr.live.> (Ctrl-C ends)", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
