"""What one node's cache worker does: keep verified blobs, lend them, and say what it holds.

1. Bytes come into the arena first, by copy or straight from a transfer, under a lease
   that nobody else knows.  There they are verified, and only then is their key visible:
   who sends cannot change what was verified, and no key ever has half its bytes.
2. A reader gets a pin, which is a read-only view of the arena itself.  Replacing or
   evicting the component meanwhile takes the key away at once, the bytes with the last
   reader.
3. Every change goes to a numbered log, from which the residency index is fed.

It decides nothing: what to keep and what to evict is for the policies.  A transfer that
still writes after its commit is not stopped here; decoding verifies once more, and
`Worker.quarantine` takes what fails out of circulation.
"""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from actors.arena.arena import Arena, Lease
from actors.change_log import ChangeLog, PlacementKey
from actors.holds import Incoming, Pin
from codec.blob import BlobHeader, Buffer, byte_view, verify_blob
from codec.codec import geometry_of
from codec.errors import ArenaFullError, CodecError, CorruptBlobError, UnknownComponentError
from codec.identity import CodecId, ComponentKey
from policies.residency.events import Delta, Placement, Snapshot

TIER = "host"

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Counters:
    """What has happened since the worker started; none of them ever falls."""

    puts: int = 0
    """Blobs published, replacements included."""

    gets: int = 0
    """Pins given."""

    misses: int = 0
    """Pins refused because the component is not here."""

    evictions: int = 0
    quarantined: int = 0
    replaced: int = 0
    """Blobs whose place a newer one of the same key took."""

    rejected_corrupt: int = 0
    rejected_full: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStat:
    """One worker at one moment; the counters are those of `Counters`."""

    node: str
    incarnation: int
    num_components: int
    stored_bytes: int
    """Of the components that can be asked for."""

    used_bytes: int
    """Of the arena: with transfers under way, and what readers keep after eviction."""

    quarantined_bytes: int
    """Of components that failed a check, while readers still keep them."""

    reserved_bytes: int
    """Addresses of the heap."""

    committed_bytes: int
    """Memory held, in use or not: under the heap, under hot pages, or under neither."""

    heap_bytes: int
    hot_bytes: int
    """Memory that hot pages use."""

    peak_bytes: int
    """The most memory that was ever committed."""

    free_bytes: int
    puts: int
    gets: int
    misses: int
    evictions: int
    quarantined: int
    replaced: int
    rejected_corrupt: int
    rejected_full: int


class Worker:
    """The components of one node's host tier.  Thread-safe.

    Parameters
    ----------
    incarnation
        Rises with every start of the node's worker.
    arena
        Used by nobody else while the worker lives.
    """

    def __init__(self, *, node: str, incarnation: int, arena: Arena) -> None:
        if not node or incarnation < 1:
            raise ValueError(f"need a name and an incarnation >= 1, got {node!r}, {incarnation}")
        self.node = node
        self.incarnation = incarnation
        self._arena = arena
        self._lock = threading.RLock()
        #: Leases of verified blobs: one for each placement in ``_changes``, no others.
        self._leases: dict[PlacementKey, Lease] = {}
        self._changes = ChangeLog(node=node, incarnation=incarnation)
        #: Of components that failed a check, while readers keep them; pruned when looked at.
        self._quarantined: list[Lease] = []
        #: Sum over ``_leases``.
        self._stored_bytes = 0
        self._counters = Counters()

    def put(self, blob: Buffer) -> Placement:
        """Store a copy of ``blob``, in place of what its component and codec had.

        Raises
        ------
        CodecError
            If it is not a sound blob.
        ArenaFullError
            If there is no room for it *beside* what it would replace.
        """
        source = byte_view(blob)
        if not source:
            self._count(rejected_corrupt=1)
            raise CorruptBlobError("length", "is empty")
        with self.reserve_incoming(len(source)) as incoming:
            incoming.view[:] = source
            return incoming.commit()

    def reserve_incoming(self, nbytes: int) -> Incoming:
        """Room for a blob of ``nbytes`` to be received into.

        Raises
        ------
        ArenaFullError
            If there is none.
        """
        try:
            lease = self._arena.reserve(nbytes)
        except ArenaFullError:
            self._count(rejected_full=1)
            raise
        with ExitStack() as undo:
            undo.callback(self._arena.release, lease)
            incoming = Incoming(self._arena, lease, self._publish)
            undo.pop_all()
        return incoming

    def get(self, key: ComponentKey, codec: CodecId) -> Pin:
        """Pin the bytes of a component; use it as a context manager.

        Raises
        ------
        UnknownComponentError
            If it is not here.
        """
        with self._lock:
            lease = self._leases.get((key, codec))
            placement = self._changes.get((key, codec))
            if lease is None or placement is None:
                self._count(misses=1)
                raise UnknownComponentError(str(key), self.node)
            pin = Pin(self._arena, lease, placement)
            self._count(gets=1)
            return pin

    def placement(self, key: ComponentKey, codec: CodecId) -> Placement | None:
        """What is listed of a component; ``None`` if it is not here.  Counts nothing."""
        with self._lock:
            return self._changes.get((key, codec))

    def evict(self, key: ComponentKey, codec: CodecId) -> None:
        """Forget a component now; where it is pinned, its bytes go with the last pin.

        Raises
        ------
        UnknownComponentError
            If it is not here.
        """
        with self._lock:
            if (key, codec) not in self._leases:
                raise UnknownComponentError(str(key), self.node)
            self._drop((key, codec))
            self._count(evictions=1)

    def quarantine(self, key: ComponentKey, codec: CodecId, why: str) -> None:
        """Forget a component whose bytes failed a check, and say so.

        One that is not here (any more) is where it should be: nothing happens then.
        """
        with self._lock:
            if (key, codec) not in self._leases:
                return
            self._quarantined.append(self._leases[key, codec])
            self._drop((key, codec))
            self._prune_quarantined()
            self._count(quarantined=1)
        _log.warning("%s: quarantined %s of codec %s: %s", self.node, key, codec.hex(), why)

    def damage(self, key: ComponentKey, codec: CodecId) -> None:
        """Flip one bit in the middle of a stored component: for drills and tests.

        Raises
        ------
        UnknownComponentError
            If it is not here.
        """
        with self._lock:
            lease = self._leases.get((key, codec))
            if lease is None:
                raise UnknownComponentError(str(key), self.node)
            with self._arena.view(lease) as view:
                view[lease.nbytes // 2] ^= 1

    def stat(self) -> WorkerStat:
        """How full the worker is, and what has happened."""
        with self._lock:
            arena = self._arena.stat()
            self._prune_quarantined()
            return WorkerStat(
                node=self.node,
                incarnation=self.incarnation,
                num_components=len(self._leases),
                stored_bytes=self._stored_bytes,
                used_bytes=arena.used_bytes,
                quarantined_bytes=sum(lease.nbytes for lease in self._quarantined),
                reserved_bytes=arena.reserved_bytes,
                committed_bytes=arena.committed_bytes,
                heap_bytes=arena.heap_bytes,
                hot_bytes=arena.hot_bytes,
                peak_bytes=arena.peak_committed_bytes,
                free_bytes=arena.free_bytes,
                **asdict(self._counters),
            )

    def take_deltas(self) -> list[Delta]:
        """See `ChangeLog.take_deltas`."""
        with self._lock:
            return self._changes.take_deltas()

    def snapshot(self) -> Snapshot:
        """See `ChangeLog.snapshot`."""
        with self._lock:
            return self._changes.snapshot()

    def check(self) -> None:
        """Assert every invariant.  For tests and validation, not for control flow."""
        with self._lock:
            self._changes.check()
            self._arena.check()
            assert len(self._changes) == len(self._leases)
            for key, lease in self._leases.items():
                placement = self._changes.get(key)
                assert placement is not None
                assert placement.stored_bytes == lease.nbytes
            assert self._stored_bytes == sum(lease.nbytes for lease in self._leases.values())

    def _publish(self, lease: Lease) -> Placement:
        """Verify the bytes of ``lease`` where they are and make them visible, or release it."""
        with ExitStack() as undo:
            undo.callback(self._arena.release, lease)
            # Not under the lock: it takes long, and nobody else knows this lease.
            placement = self._placement(self._verify(lease), lease.nbytes)
            with self._lock:
                undo.pop_all()
                key = (placement.component, placement.codec)
                replaced = self._leases.get(key)
                self._leases[key] = lease
                self._changes.set(placement)
                self._stored_bytes += lease.nbytes
                self._count(puts=1)
                if replaced is not None:
                    self._stored_bytes -= replaced.nbytes
                    self._count(replaced=1)
                    self._arena.release(replaced)
        return placement

    def _verify(self, lease: Lease) -> BlobHeader:
        with self._arena.view(lease) as view:
            try:
                return verify_blob(view)
            except CodecError as error:
                self._count(rejected_corrupt=1)
                # Its traceback, and that of what it came from, hold views of the bytes:
                # the room would not be free until the caller has dropped the error.
                error.__context__ = None
                raise error.with_traceback(None) from None

    def _placement(self, header: BlobHeader, stored_bytes: int) -> Placement:
        return Placement(
            component=header.component,
            codec=CodecId(header.codec),
            node=self.node,
            tier=TIER,
            stored_bytes=stored_bytes,
            decoded_bytes=geometry_of(header).raw_bytes_per_token * header.num_tokens,
            num_tokens=header.num_tokens,
        )

    def _drop(self, key: PlacementKey) -> None:
        lease = self._leases.pop(key)
        self._changes.remove(key)
        self._stored_bytes -= lease.nbytes
        self._arena.release(lease)

    def _prune_quarantined(self) -> None:
        self._quarantined = [it for it in self._quarantined if self._arena.is_held(it)]

    def _count(self, **increments: int) -> None:
        with self._lock:
            for name, increment in increments.items():
                setattr(self._counters, name, getattr(self._counters, name) + increment)
