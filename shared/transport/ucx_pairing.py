"""Makes the two ends of a connection the two ends of one UCX endpoint pair.

UCX numbers the endpoints that a worker makes to another worker's address, and ties the n-th of one side to the n-th of
the other. Rendezvous messages name the far end that they are tied to, so where connections made at once number theirs
in different orders, one that closes cancels the transfers of another. Here both sides make theirs in turns.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from typing import Any, Final

from shared.transport.errors import PeerGone
from shared.transport.handshake import Agreement
from shared.transport.stream import Stream

MAX_BEHIND: Final = 1024
"""Each attempt that breaks off between the two sides puts one of them behind by one, until the next that succeeds."""
_NUMBER = struct.Struct("<Q")


class _Peer:
    """What this process has made to one worker; kept as long as UCX keeps its own count, which is for good."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()  # held by the leader for the whole exchange
        self.making = asyncio.Lock()
        self.made = 0


class EndpointPairing:
    """One per UCX worker, and all its endpoints to other workers are made here.

    The side with the smaller worker address leads: one connection at a time, it tells how many endpoints it has made,
    the other side makes its own and answers with its number, and the leader makes the one of that number.
    """

    def __init__(self, make: Callable[[bytes], Awaitable[Any]], discard: Callable[[Any], None]) -> None:
        self._make = make
        self._discard = discard
        self._peers: dict[bytes, _Peer] = {}

    async def make(self, stream: Stream, agreement: Agreement, *, accepted: bool) -> Any:
        """The endpoint of this connection. Raises PeerGone, ProtocolViolation, and what making one raises."""
        mine, theirs = agreement.mine.address, agreement.theirs.address
        peer = self._peers.setdefault(theirs, _Peer())
        if mine < theirs or (mine == theirs and not accepted):
            async with peer.turn:
                await stream.send_frame(_NUMBER.pack(peer.made), _NUMBER.size)
                number = await _receive_number(stream)
                async with peer.making:
                    return await self._make_number(peer, number + 1 if mine == theirs else number, theirs)
        led = await _receive_number(stream)
        async with peer.making:
            number = max(peer.made, led)
            if mine == theirs:
                number += number % 2  # UCX ties a worker's endpoints to itself in pairs: 0 to 1, 2 to 3
            endpoint = await self._make_number(peer, number, theirs)
        try:
            await stream.send_frame(_NUMBER.pack(number), _NUMBER.size)
        except BaseException:
            self._discard(endpoint)
            raise
        return endpoint

    async def _make_number(self, peer: _Peer, number: int, address: bytes) -> Any:
        if not 0 <= number - peer.made <= MAX_BEHIND:
            raise PeerGone(f"the peer is at UCX endpoint {number}, this process at {peer.made}")
        while peer.made < number:
            peer.made += 1
            self._discard(await self._make(address))
        peer.made += 1  # before it is made: UCX counts those that fail, too
        return await self._make(address)


async def _receive_number(stream: Stream) -> int:
    payload = await stream.receive_frame(_NUMBER.size)
    if len(payload) != _NUMBER.size:
        raise PeerGone(f"{stream.peer} did not tell the number of its UCX endpoint")
    return int(_NUMBER.unpack(payload)[0])
