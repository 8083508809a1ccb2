"""`Worker` against a dictionary: whole, verified bytes under every key, or a miss."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.arena.arena import Arena
from actors.arena.driver_host import HostVmmDriver
from actors.arena.syscalls import PAGE_BYTES
from actors.holds import Incoming, Pin
from actors.worker import Worker
from codec.blob import Buffer
from codec.errors import (
    ArenaFullError,
    CorruptBlobError,
    StaleLeaseError,
    UnknownComponentError,
    UnsupportedVersionError,
    VmmDriverError,
)
from codec.identity import CodecId, ComponentKey
from policies.residency.events import Delta, Placement, Snapshot
from tests.suites.blobs import RAW_BYTES_PER_TOKEN, codec_of, key_of, make_blob
from tests.suites.faulty_driver import FaultyDriver
from tests.suites.probes import run_in_threads
from tests.suites.quiet import QUIET_STATEFUL

EXTENT = 2 * PAGE_BYTES
CAPACITY = 8 * EXTENT

Key = tuple[ComponentKey, CodecId]


def make_worker(driver: HostVmmDriver) -> tuple[Worker, Arena]:
    """A worker over a small arena."""
    arena = Arena(driver, capacity_bytes=CAPACITY, extent_bytes=EXTENT)
    return Worker(node="node", incarnation=5, arena=arena), arena


@pytest.fixture
def arena() -> Iterator[Arena]:
    """A small arena that nothing pins after the test, and that leaves nothing."""
    driver = HostVmmDriver(CAPACITY, PAGE_BYTES)
    arena = Arena(driver, capacity_bytes=CAPACITY, extent_bytes=EXTENT)
    yield arena
    arena.close()
    assert driver.physical().measured_bytes == 0
    driver.close()


@pytest.fixture
def worker(arena: Arena) -> Iterator[Worker]:
    """A worker whose invariants are checked after the test."""
    worker = Worker(node="node", incarnation=5, arena=arena)
    yield worker
    worker.check()


def read(worker: Worker, chunk: int = 0, codec: int = 0) -> bytes:
    """The bytes held under `make_blob`'s key."""
    with worker.get(key_of(chunk), codec_of(codec)) as pin:
        return bytes(pin.view)


class WorkerMachine(RuleBasedStateMachine):
    """The model is a dictionary of blobs; readers and transfers come and go at random."""

    chunks = st.integers(0, 3)
    codecs = st.integers(0, 1)
    sizes = st.sampled_from([1, 100, PAGE_BYTES, EXTENT, 3 * EXTENT])

    def __init__(self) -> None:
        super().__init__()
        self.driver = FaultyDriver(CAPACITY, PAGE_BYTES)
        self.worker, self.arena = make_worker(self.driver)
        self.held: dict[Key, bytes] = {}
        self.pins: list[tuple[Pin, bytes]] = []
        self.transfers: list[tuple[Incoming, Key, bytes]] = []
        self.followed: dict[Key, Placement] = {}
        self.seq = 0
        self.num_made = 0

    def blob(self, chunk: int, codec: int, size: int) -> tuple[Key, bytes]:
        """A blob that no other is equal to."""
        self.num_made += 1
        payload = self.num_made.to_bytes(4, "little") + b"\xff" * size
        return (key_of(chunk), codec_of(codec)), make_blob(chunk, codec, payload=payload)

    @rule(chunk=chunks, codec=codecs, size=sizes)
    def put(self, chunk: int, codec: int, size: int) -> None:
        """Store, or be refused for want of room; then what was there stays."""
        key, blob = self.blob(chunk, codec, size)
        before = self.worker.stat()
        try:
            placement = self.worker.put(blob)
        except ArenaFullError:
            after = self.worker.stat()
            assert (after.used_bytes, after.puts) == (before.used_bytes, before.puts)
            assert after.rejected_full == before.rejected_full + 1
            return
        assert (placement.component, placement.codec) == key
        assert placement.stored_bytes == len(blob)
        self.held[key] = blob

    @rule(chunk=chunks, size=sizes, position=st.integers(0, 10**6))
    def put_damaged(self, chunk: int, size: int, position: int) -> None:
        """Refused, and nothing is different."""
        _, blob = self.blob(chunk, 0, size)
        damaged = bytearray(blob)
        damaged[position % len(blob)] ^= 1 << position % 8
        before = self.worker.stat()
        with pytest.raises((CorruptBlobError, UnsupportedVersionError, ArenaFullError)):
            self.worker.put(damaged)
        assert self.worker.stat().used_bytes == before.used_bytes

    @rule(chunk=chunks, codec=codecs)
    def get(self, chunk: int, codec: int) -> None:
        """A pin on the newest bytes, or a miss."""
        key = (key_of(chunk), codec_of(codec))
        if key not in self.held:
            with pytest.raises(UnknownComponentError):
                self.worker.get(*key)
            return
        self.pins.append((self.worker.get(*key), self.held[key]))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        """A reader is done."""
        pin, _ = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        pin.release()

    @rule(chunk=chunks, codec=codecs, is_quarantine=st.booleans())
    def drop(self, chunk: int, codec: int, is_quarantine: bool) -> None:
        """Evict or quarantine, whoever reads."""
        key = (key_of(chunk), codec_of(codec))
        if is_quarantine:
            self.worker.quarantine(*key, "drill")
        elif key in self.held:
            self.worker.evict(*key)
        else:
            with pytest.raises(UnknownComponentError):
                self.worker.evict(*key)
        self.held.pop(key, None)

    @rule(chunk=chunks, codec=codecs, size=sizes)
    def begin_transfer(self, chunk: int, codec: int, size: int) -> None:
        """Room for a blob of which half has arrived."""
        key, blob = self.blob(chunk, codec, size)
        try:
            incoming = self.worker.reserve_incoming(len(blob))
        except ArenaFullError:
            return
        half = len(blob) // 2
        incoming.view[:] = blob[:half] + bytes(len(blob) - half)
        self.transfers.append((incoming, key, blob))

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), how=st.sampled_from(["commit", "too early", "abort", "drop"]))
    def end_transfer(self, data: st.DataObject, how: str) -> None:
        """Finish, or not."""
        at = data.draw(st.integers(0, len(self.transfers) - 1))
        incoming, key, blob = self.transfers.pop(at)
        if how == "commit":
            incoming.view[:] = blob
            assert incoming.commit().stored_bytes == len(blob)
            self.held[key] = blob
        elif how == "too early":
            with pytest.raises(CorruptBlobError):
                incoming.commit()
        elif how == "abort":
            incoming.abort()

    @rule()
    def follow(self) -> None:
        """Replay the deltas; they lead to exactly what a snapshot says."""
        for delta in self.worker.take_deltas():
            self.seq += 1
            assert (delta.node, delta.incarnation, delta.seq) == ("node", 5, self.seq)
            for key in delta.removed:
                del self.followed[key]
            self.followed |= {(p.component, p.codec): p for p in delta.added}
        snapshot = self.worker.snapshot()
        assert snapshot.seq == self.seq
        assert sorted(map(str, snapshot.placements)) == sorted(map(str, self.followed.values()))
        stored = {key: placement.stored_bytes for key, placement in self.followed.items()}
        assert stored == {key: len(blob) for key, blob in self.held.items()}

    @rule(verb=st.sampled_from(["create", "map", "set_access"]))
    def run_out_of_memory(self, verb: str) -> None:
        """A transfer that the system has no memory for leaves nothing behind."""
        before = self.worker.stat()
        self.driver.fail(verb)
        with suppress(VmmDriverError, ArenaFullError):
            self.worker.reserve_incoming(EXTENT).abort()
        self.driver.heal()
        after = self.worker.stat()
        assert (after.used_bytes, after.num_components) == (
            before.used_bytes,
            before.num_components,
        )

    @invariant()
    def readers_keep_what_they_got(self) -> None:
        """Whatever was replaced, evicted or quarantined meanwhile."""
        assert all(pin.view == blob for pin, blob in self.pins)

    @invariant()
    def the_books_are_right(self) -> None:
        """Counts, sums and the arena's own."""
        self.worker.check()
        stat, physical = self.worker.stat(), self.driver.physical()
        assert stat.num_components == len(self.held)
        assert stat.stored_bytes == sum(map(len, self.held.values()))
        assert stat.committed_bytes == physical.booked_bytes == physical.measured_bytes
        assert stat.puts - stat.replaced - stat.evictions - stat.quarantined == len(self.held)

    def teardown(self) -> None:
        """When readers and transfers are gone, the arena is as empty as the worker."""
        self.transfers.clear()
        for pin, _ in self.pins:
            pin.release()
        self.pins.clear()
        for key, blob in self.held.items():
            with self.worker.get(*key) as pin:
                assert pin.view == blob
            self.worker.evict(*key)
        assert self.worker.stat().used_bytes == 0
        self.arena.close()
        self.driver.close()


TestWorkerMachine = WorkerMachine.TestCase
TestWorkerMachine.settings = QUIET_STATEFUL


def test_a_placement_says_what_is_stored(worker: Worker) -> None:
    """Sizes against 16-bit storage come from the header, not from the sender."""
    blob = make_blob(3, payload=b"x" * 50, num_tokens=20)

    placement = worker.put(blob)

    assert placement == Placement(
        component=key_of(3),
        codec=codec_of(),
        node="node",
        tier="host",
        stored_bytes=len(blob),
        decoded_bytes=RAW_BYTES_PER_TOKEN * 20,
        num_tokens=20,
    )
    assert read(worker, 3) == blob


@pytest.mark.parametrize(
    "kind",
    [bytes, bytearray, memoryview, lambda blob: np.frombuffer(blob, np.uint8).data],
    ids=["bytes", "bytearray", "memoryview", "array"],
)
def test_any_buffer_can_be_put(worker: Worker, kind: Callable[[bytes], Buffer]) -> None:
    """Also one over an array; the worker keeps a copy."""
    blob = make_blob()
    worker.put(kind(blob))

    assert read(worker) == blob


@pytest.mark.parametrize("damage", ["flip", "cut", "extend", "empty", "version"])
def test_no_damaged_blob_is_published(worker: Worker, damage: str) -> None:
    """The old bytes stay, the room is free at once, and it is counted."""
    old = make_blob(payload=b"old")
    worker.put(old)
    new = bytearray(make_blob(payload=b"new bytes"))
    if damage == "flip":
        new[-1] ^= 1
    elif damage == "version":
        new[4] ^= 2
    else:
        new = {"cut": new[:-1], "extend": new + b"\0", "empty": bytearray()}[damage]

    kind = UnsupportedVersionError if damage == "version" else CorruptBlobError
    with pytest.raises(kind) as caught:
        worker.put(new)

    assert worker.stat().used_bytes == len(old), caught
    assert read(worker) == old
    stat = worker.stat()
    assert (stat.puts, stat.rejected_corrupt, stat.replaced) == (1, 1, 0)


def test_a_sender_cannot_change_what_was_verified(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender's buffer changes between copy and check, which see the same bytes."""
    blob = make_blob()
    buffer = bytearray(blob)
    verify = Worker._verify

    def mutating(self: Worker, lease: object) -> object:
        buffer[-1] ^= 1
        return verify(self, lease)  # type: ignore[arg-type]

    monkeypatch.setattr(Worker, "_verify", mutating)
    worker.put(buffer)

    assert buffer != blob
    assert read(worker) == blob


def test_a_reader_keeps_the_bytes_that_are_replaced(worker: Worker) -> None:
    """It got a whole blob and keeps it; who comes later gets the new one."""
    old, new = make_blob(payload=b"old"), make_blob(payload=b"newer")
    worker.put(old)
    with worker.get(key_of(0), codec_of()) as pin:
        worker.put(new)

        assert bytes(pin.view) == old
        assert read(worker) == new
        assert worker.stat().used_bytes == len(old) + len(new)

    assert worker.stat().used_bytes == len(new)
    assert (worker.stat().puts, worker.stat().replaced) == (2, 1)


def test_codecs_of_a_component_are_apart(worker: Worker) -> None:
    """A key never depends on the codec, so both blobs are held."""
    blobs = [make_blob(codec=codec, payload=b"%d" % codec) for codec in range(2)]
    for blob in blobs:
        worker.put(blob)

    worker.evict(key_of(0), codec_of(0))

    assert read(worker, codec=1) == blobs[1]
    with pytest.raises(UnknownComponentError) as caught:
        worker.get(key_of(0), codec_of(0))
    assert (caught.value.component, caught.value.node) == (str(key_of(0)), "node")


def test_an_evicted_component_is_gone_at_once_and_its_bytes_later(worker: Worker) -> None:
    """Eviction is deferred for the readers, not for the key."""
    blob = make_blob()
    worker.put(blob)
    pin = worker.get(key_of(0), codec_of())

    worker.evict(key_of(0), codec_of())

    with pytest.raises(UnknownComponentError):
        worker.get(key_of(0), codec_of())
    assert bytes(pin.view) == blob
    assert (worker.stat().stored_bytes, worker.stat().used_bytes) == (0, len(blob))
    pin.release()
    assert worker.stat().used_bytes == 0


def test_a_full_arena_changes_nothing(worker: Worker) -> None:
    """Even the blob that would be replaced stays, since both have to fit for a while."""
    old = make_blob(payload=b"o" * (CAPACITY // 2 + 1))
    worker.put(old)
    with pytest.raises(ArenaFullError):
        worker.put(make_blob(payload=b"n" * (CAPACITY // 2 + 1)))

    assert read(worker) == old
    assert worker.stat().rejected_full == 1
    assert len(worker.take_deltas()) == 1


def test_an_incoming_key_is_invisible_until_its_commit(worker: Worker) -> None:
    """Half-received bytes are nobody's."""
    blob = make_blob()
    incoming = worker.reserve_incoming(len(blob))
    incoming.view[:] = blob
    with pytest.raises(UnknownComponentError):
        worker.get(key_of(0), codec_of())
    assert worker.snapshot() == Snapshot("node", 5, 0)

    placement = incoming.commit()

    assert worker.snapshot() == Snapshot("node", 5, 1, (placement,))
    assert read(worker) == blob


def test_a_torn_transfer_is_refused_and_gives_its_room_back(worker: Worker) -> None:
    """As `put` would."""
    blob = make_blob()
    incoming = worker.reserve_incoming(len(blob))
    incoming.view[: len(blob) // 2] = blob[: len(blob) // 2]

    with pytest.raises(CorruptBlobError):
        incoming.commit()

    incoming.abort()
    with pytest.raises(StaleLeaseError):
        incoming.commit()
    assert worker.stat().used_bytes == 0
    assert worker.stat().rejected_corrupt == 1


def test_quarantine_takes_bad_bytes_out_of_circulation(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    """Never served again; said in the log and in the stream; harmless when repeated."""
    worker.put(make_blob())
    worker.take_deltas()
    with caplog.at_level(logging.WARNING):
        worker.quarantine(key_of(0), codec_of(), "flipped in memory")
        worker.quarantine(key_of(0), codec_of(), "flipped in memory")

    with pytest.raises(UnknownComponentError):
        worker.get(key_of(0), codec_of())
    assert worker.take_deltas() == [Delta("node", 5, 2, removed=((key_of(0), codec_of()),))]
    assert worker.stat().quarantined == 1
    assert [record.message.endswith("flipped in memory") for record in caplog.records] == [True]
    worker.put(make_blob())
    assert read(worker) == make_blob()


def test_a_drill_damages_what_is_stored(worker: Worker) -> None:
    """One bit, where it lies; a component that is not here cannot be damaged."""
    blob = make_blob()
    worker.put(blob)

    worker.damage(key_of(0), codec_of())

    assert sum(a != b for a, b in zip(read(worker), blob, strict=True)) == 1
    with pytest.raises(UnknownComponentError):
        worker.damage(key_of(1), codec_of())


def test_counters_tell_hits_from_misses(worker: Worker) -> None:
    """Each call is counted once."""
    worker.put(make_blob())
    read(worker)
    for _ in range(2):
        with pytest.raises(UnknownComponentError):
            read(worker, chunk=9)
    worker.evict(key_of(0), codec_of())

    stat = worker.stat()

    assert (stat.gets, stat.misses, stat.evictions) == (1, 2, 1)
    assert (stat.node, stat.incarnation) == ("node", 5)
    assert stat.free_bytes == CAPACITY


def test_threads_never_see_half_a_blob(worker: Worker) -> None:
    """Writers replace, one evicts, readers read: whole blobs or misses."""
    blobs = [make_blob(payload=bytes([i]) * (500 * i)) for i in range(1, 6)]
    stop = threading.Event()

    def write() -> None:
        try:
            for step in range(150):
                worker.put(blobs[step % 5])
                if step % 7 == 0:
                    worker.quarantine(key_of(0), codec_of(), "drill")
        finally:
            stop.set()

    def look() -> None:
        while not stop.is_set():
            with suppress(UnknownComponentError):
                assert read(worker) in blobs

    run_in_threads(lambda number: look() if number else write(), 4)

    assert worker.stat().puts == 150


@pytest.mark.parametrize(("node", "incarnation"), [("", 1), ("node", 0)])
def test_a_worker_has_a_name_and_an_incarnation(arena: Arena, node: str, incarnation: int) -> None:
    """Its stream could not be told from another's otherwise."""
    with pytest.raises(ValueError, match="incarnation"):
        Worker(node=node, incarnation=incarnation, arena=arena)


def test_a_quarantined_component_is_counted_while_a_reader_keeps_it(worker: Worker) -> None:
    """Its key is gone at once; its bytes are in doubt until nobody has them."""
    blob = make_blob()
    worker.put(blob)
    pin = worker.get(key_of(0), codec_of())

    worker.quarantine(key_of(0), codec_of(), "a checksum")

    stat = worker.stat()
    assert (stat.quarantined, stat.quarantined_bytes, stat.stored_bytes) == (1, len(blob), 0)
    assert stat.used_bytes == len(blob)
    pin.release()
    assert worker.stat().quarantined_bytes == 0
    assert worker.stat().used_bytes == 0


def test_memory_is_told_apart(worker: Worker, arena: Arena) -> None:
    """Addresses, memory under the heap, the peak; nothing is hot where no model runs."""
    worker.put(make_blob())
    worker.evict(key_of(0), codec_of())

    stat = worker.stat()

    assert stat.committed_bytes == stat.heap_bytes == arena.stat().committed_bytes
    assert stat.peak_bytes == stat.committed_bytes > 0
    assert stat.reserved_bytes > stat.committed_bytes
    assert (stat.hot_bytes, stat.quarantined_bytes) == (0, 0)
