"""Components, a source and a sink for the transport tests; nothing here knows of UCX."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Self

from actors.transport.messages import Want
from codec.errors import ArenaFullError, CorruptBlobError, UnknownComponentError
from codec.geometry import Stage
from codec.identity import ChunkKey, CodecId, ComponentKey, digest
from policies.residency.events import Placement

CODEC = CodecId(digest("test.codec"))
STAGE = Stage(0, 30, 0, 3)


def key(index: int) -> ComponentKey:
    """Name of sample ``index``."""
    return ComponentKey(ChunkKey(digest("test.chunk", index.to_bytes(4, "little"))), STAGE)


def want(index: int) -> Want:
    """What asks for sample ``index``."""
    return Want(key(index), CODEC)


def payload(index: int, size: int) -> bytes:
    """Bytes of sample ``index``: the same in every process."""
    return random.Random(index).randbytes(size)


def samples(sizes: Sequence[int]) -> dict[Want, bytes]:
    """One sample per size, in order."""
    return {want(index): payload(index, size) for index, size in enumerate(sizes)}


class SamplePin:
    """Counts how often it is entered and left."""

    def __init__(self, source: SampleSource, data: bytes) -> None:
        self._source = source
        self.view = memoryview(data)

    def __enter__(self) -> Self:
        self._source.num_pinned += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._source.num_pinned -= 1


class SampleSource:
    """A worker's serving face over a dict."""

    def __init__(self, held: dict[Want, bytes]) -> None:
        self.held = held
        #: Pins entered and not left.
        self.num_pinned = 0
        #: Raised instead of an answer, by want.
        self.errors: dict[Want, Exception] = {}

    def get(self, component: ComponentKey, codec: CodecId) -> SamplePin:
        """See `actors.transport.ports.Source`."""
        asked = Want(component, codec)
        if asked in self.errors:
            raise self.errors[asked]
        if asked not in self.held:
            raise UnknownComponentError(str(component), "sample")
        return SamplePin(self, self.held[asked])


class SampleIncoming:
    """Room for one payload; ends once."""

    def __init__(self, sink: SampleSink, num_bytes: int) -> None:
        self._sink = sink
        self.buffer = bytearray(num_bytes)
        self.view = memoryview(self.buffer)

    def commit(self) -> Placement:
        """Publish, if the bytes are those of a known sample."""
        found = self._sink.known.get(bytes(self.buffer))
        if found is None:
            raise CorruptBlobError("header", "no such sample")
        self._sink.end(self, "committed")
        self._sink.committed[found] = bytes(self.buffer)
        return Placement(found.component, found.codec, "sink", "host", len(self.buffer), 1, 1)

    def abort(self) -> None:
        """Give the room back."""
        self._sink.end(self, "aborted")


class SampleSink:
    """A worker's receiving face; recognizes samples by content, as a worker does by header."""

    def __init__(self, known: dict[Want, bytes], *, capacity_bytes: int = 1 << 30) -> None:
        self.known = {data: named for named, data in known.items()}
        self.free_bytes = capacity_bytes
        #: Every reservation ever made, and those that have not ended.
        self.reserved: list[SampleIncoming] = []
        self.open: set[SampleIncoming] = set()
        self.on_reserve: Callable[[], object] = lambda: None
        self.ended: Counter[str] = Counter()
        self.committed: dict[Want, bytes] = {}

    def reserve_incoming(self, num_bytes: int) -> SampleIncoming:
        """See `actors.transport.ports.Sink`."""
        if num_bytes > self.free_bytes:
            raise ArenaFullError(num_bytes, self.free_bytes)
        self.free_bytes -= num_bytes
        incoming = SampleIncoming(self, num_bytes)
        self.reserved.append(incoming)
        self.open.add(incoming)
        self.on_reserve()
        return incoming

    def end(self, incoming: SampleIncoming, how: str) -> None:
        """Note how a reservation ended; a second end is an error."""
        self.open.remove(incoming)
        self.ended[how] += 1
