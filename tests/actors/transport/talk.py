"""Drives a `PullClient` and a `PullServer` against each other in memory, as bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from actors.transport.kinds import MissingReason
from actors.transport.messages import Pull, Want
from actors.transport.report import Outcome
from actors.transport.session import PullClient, PullServer
from actors.transport.session import instructions as i
from codec.errors import StaleError
from tests.actors.transport.samples import SampleSource

CLIENT_NONCE = b"c" * 16
SERVER_NONCE = b"s" * 16
INCARNATION = 77


def new_client(*, incarnation: int = INCARNATION, window: int = 4) -> PullClient:
    """A client that means the server that `new_server` makes."""
    return PullClient(
        node="left",
        server_node="right",
        incarnation=incarnation,
        nonce=CLIENT_NONCE,
        window=window,
    )


def new_server() -> PullServer:
    """A server of incarnation `INCARNATION`."""
    return PullServer(node="right", incarnation=INCARNATION, nonce=SERVER_NONCE)


def pull_of(wants: Iterable[Want], *, max_bytes: int = 1 << 30) -> Pull:
    """A pull with room for everything."""
    return Pull(tuple(wants), max_bytes)


class Talk:
    """Two byte streams between two machines, and a log of what the client was told.

    It obeys as a link over a plain stream would: payload bytes follow their header, and a
    machine is given at most the bytes that it wants, ``chunk_bytes`` at a time.
    """

    def __init__(
        self,
        client: PullClient,
        server: PullServer,
        source: SampleSource,
        *,
        chunk_bytes: int = 1 << 20,
    ) -> None:
        self.client = client
        self.server = server
        self.source = source
        self.chunk_bytes = chunk_bytes
        self.to_client = bytearray()
        self.to_server = bytearray()
        self.log: list[i.Instruction] = []
        #: Payloads committed, by index.
        self.committed: dict[int, bytes] = {}
        #: Changes a payload on its way.
        self.damage: Callable[[int, bytes], bytes] = lambda _index, data: data
        #: Says how the commit of a sound payload ends.
        self.commit_as: Callable[[int], Outcome] = lambda _index: Outcome.DELIVERED
        #: Indices for which the sink has no room.
        self.full: set[int] = set()
        #: Ordinals under which the server has sent payloads.
        self.ordinals: list[int] = []
        self.released: list[tuple[Want, ...]] = []
        self.num_closes = 0

    def run(self, *starts: i.Send) -> None:
        """Pass bytes until neither side wants any that are there."""
        for start in starts:
            self.to_server += start.data
        while self._feed_server() or self._feed_client():
            self.client.check()
            self.server.check()

    def _feed_server(self) -> bool:
        size = min(self.server.bytes_wanted, self.chunk_bytes, len(self.to_server))
        data = bytes(self.to_server[:size])
        del self.to_server[:size]
        todo = self.server.receive(data) if data else []
        while todo:
            todo = [*todo[1:], *self._serve(todo[0])]
        return bool(data)

    def _serve(self, instruction: i.Instruction) -> list[i.Instruction]:
        match instruction:
            case i.Send(data):
                self.to_client += data
            case i.SendPayload(ordinal, view):
                self.ordinals.append(ordinal)
                self.to_client += view
            case i.OpenComponent(_, want):
                try:
                    pin = self.source.get(want.component, want.codec)
                except StaleError:
                    return self.server.missing(MissingReason.UNKNOWN)
                return self.server.opened(pin.view)
            case i.ReleasePins(rejected):
                self.released.append(rejected)
            case i.Close():
                self.num_closes += 1
        return []

    def _feed_client(self) -> bool:
        size = min(self.client.bytes_wanted, self.chunk_bytes, len(self.to_client))
        data = bytes(self.to_client[:size])
        del self.to_client[:size]
        todo = self.client.receive(data) if data else []
        while todo:
            todo = [*todo[1:], *self._pull(todo[0])]
        return bool(data)

    def _pull(self, instruction: i.Instruction) -> list[i.Instruction]:
        self.log.append(instruction)
        match instruction:
            case i.Send(data):
                self.to_server += data
            case i.ReceiveProbe(_, num_bytes):
                del self.to_client[:num_bytes]
            case i.ReceivePayload(index, _, num_bytes):
                data = self.damage(index, bytes(self.to_client[:num_bytes]))
                del self.to_client[:num_bytes]
                if index in self.full:
                    self.client.no_room(index)
                    return []
                self.committed[index] = data
                return self.client.payload_received(index, memoryview(data))
            case i.Commit(index):
                return self.client.settled(index, self.commit_as(index))
            case i.Discard(index):
                del self.committed[index]
            case i.Close():
                self.num_closes += 1
        return []


def greeted(
    source: SampleSource | None = None, *, window: int = 4, chunk_bytes: int = 1 << 20
) -> Talk:
    """A talk that has got past WELCOME."""
    client = new_client(window=window)
    talk = Talk(client, new_server(), source or SampleSource({}), chunk_bytes=chunk_bytes)
    talk.run(client.greet())
    return talk
