"""A hybrid model's keys and values in real memory, through steps, forks and releases."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.arena.arena import Arena
from actors.arena.driver_host import HostVmmDriver
from actors.arena.hot_pages import HotPages
from actors.arena.layout import plan_hot_layout
from actors.arena.table.certificates import CertificateLog
from actors.arena.table.steps import StepItem
from codec.errors import StaleNameError, VmmBusy
from policies.certificates import verify
from policies.retention.evaluate import may_read
from policies.retention.ir import Relation
from policies.retention.plan import Plan, compile_program
from policies.retention.program import AttentionState, KvShape, Program
from policies.retention.text import parse_relation
from tests.suites.quiet import QUIET

GRANULE = 4096
STEP = 8
READS = ("true", "q - k < 10", "q - k < 7 or k < 5", "q // 8 == k // 8", "q - k < 5 or k % 3 == 0")
SHAPE = KvShape(num_kv_heads=2, key_dim=8, value_dim=4, dtype="float32")
S = "stream 0"


def plan() -> Plan:
    """Two layers of every kind of retention."""
    states = tuple(
        AttentionState(
            name=f"a{i}",
            layers=(2 * i, 2 * i + 1),
            reads=parse_relation(text),
            bytes_per_token_layer=SHAPE.bytes_per_token_layer,
            shape=SHAPE,
        )
        for i, text in enumerate(READS)
    )
    return compile_program(Program(page_tokens=4, states=states), step_tokens=STEP)


LAYERS = range(2 * len(READS))


@dataclass
class Bench:
    """Hot pages, and what every request stored."""

    driver: HostVmmDriver
    arena: Arena
    hot: HotPages
    lines: list[bytes]
    stored: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def build(cls, *, rings: bool = True) -> Bench:
        """Room for four requests of 64 tokens."""
        compiled = plan()
        layout = plan_hot_layout(
            compiled, extent_bytes=GRANULE, num_requests=4, context_tokens=64, rings=rings
        )
        driver = HostVmmDriver(4096 * GRANULE, GRANULE)
        arena = Arena(driver, capacity_bytes=16 * GRANULE, extent_bytes=GRANULE, hot=layout)
        lines: list[bytes] = []
        log = CertificateLog(lambda data: lines.extend(data.splitlines(keepends=True)))
        return cls(driver, arena, HotPages(arena, compiled, log), lines)

    def open(self) -> int:
        """A request without tokens."""
        number = self.hot.table.open()
        self.stored[number] = []
        return number

    def fork(self, number: int) -> int:
        """A request with the same tokens."""
        child = self.hot.table.fork(number)
        self.stored[child] = list(self.stored[number])
        return child

    def step(self, number: int, size: int) -> None:
        """Store ``size`` random tokens and run them to the end."""
        before = self.hot.table.boundary(number)
        item = StepItem(request=number, before=before, after=before + size)
        (step,) = self.hot.table.prepare([item])
        (seq,) = self.hot.table.commit([self.hot.carry_out(step)], S)
        for _ in range(size):
            self.stored[number].append(torch.randn(len(LAYERS), 2, 12))
        new = torch.stack(self.stored[number][before:])
        for layer in LAYERS:
            self.hot.store(step, layer, new[:, layer, :, :8], new[:, layer, :, 8:])
        self.hot.table.complete({S: [seq]})

    def look(self, number: int) -> None:
        """Every layer has exactly what a later query may read, as it was stored."""
        boundary = len(self.stored[number])
        for layer in LAYERS:
            found = self.hot.gather(number, layer)
            reads = parse_relation(READS[layer // 2])
            assert set(found) == live_keys(reads, boundary)
            for position, (key, value) in found.items():
                wanted = self.stored[number][position][layer]
                assert torch.equal(key, wanted[:, :8])
                assert torch.equal(value, wanted[:, 8:])


def live_keys(reads: Relation, boundary: int) -> set[int]:
    """Keys that some query from ``boundary`` on reads, tried one by one."""
    return {
        k
        for k in range(boundary)
        if any(may_read(reads, q, k) for q in range(boundary, boundary + 64))
    }


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Hot pages that leave nothing behind."""
    bench = Bench.build()
    yield bench
    for number in bench.stored:
        bench.hot.table.release(number)
    gc.collect()
    bench.hot.table.reclaim()
    bench.arena.check()
    assert bench.arena.stat().hot_bytes == 0
    assert verify(bench.lines).is_at_rest
    bench.arena.close()
    physical = bench.driver.physical()
    assert (physical.booked_bytes, physical.measured_bytes) == (0, 0)
    bench.driver.close()


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, STEP)), min_size=1, max_size=14),
    st.booleans(),
)
@settings(QUIET, max_examples=25)
def test_every_lineage_reads_what_it_stored(script: list[tuple[int, int]], rings: bool) -> None:
    """Through any steps and forks, in pools and in rings."""
    bench = Bench.build(rings=rings)
    numbers = [bench.open()]
    for which, size in script:
        number = numbers[which % len(numbers)]
        if which == 3 and len(numbers) < 3 and bench.stored[number]:
            numbers.append(bench.fork(number))
        if len(bench.stored[number]) + size <= 64:
            bench.step(number, size)

    for number in numbers:
        bench.look(number)
    bench.arena.check()
    bench.hot.table.check()
    physical = bench.driver.physical()
    assert physical.measured_bytes == physical.booked_bytes == bench.arena.stat().committed_bytes


def test_a_sliding_window_is_one_piece_at_every_step(bench: Bench) -> None:
    """No step copies it and none parts it, however often the ring has come round."""
    number = bench.open()
    index = next(i for i, r in enumerate(bench.arena.regions) if r.spec.name.startswith("a1"))
    for boundary in range(1, 61):
        bench.step(number, 1)
        count = min(boundary, 9)

        keys, values = bench.hot.window(number, index, 3, count)

        wanted = torch.stack(bench.stored[number][-count:])[:, 3]
        assert torch.equal(keys, wanted[:, :, :8])
        assert torch.equal(values, wanted[:, :, 8:])
        assert keys.stride(0) == values.stride(0)
        assert keys.storage_offset() >= 0


def test_a_tensor_that_the_user_keeps_never_shows_other_bytes(bench: Bench) -> None:
    """Its request ends and others come and go; its page stays until the tensor is gone."""
    number = bench.open()
    bench.step(number, 6)
    name = bench.hot.table.pages(number, 0)[0]
    keys, values = bench.hot.kv(name, 0)
    kept = keys[1:3]
    wanted = kept.clone()
    del keys, values
    bench.hot.table.release(number)
    del bench.stored[number]

    for _ in range(3):
        other = bench.open()
        bench.step(other, 8)
        bench.hot.table.release(other)
        del bench.stored[other]

    assert torch.equal(kept, wanted)
    assert name not in [c.page for c in bench.hot.table.reclaim()]
    with pytest.raises(VmmBusy, match="tensors over its pages"):
        bench.arena.close()
    del kept
    gc.collect()
    assert name in [c.page for c in bench.hot.table.reclaim()]
    with pytest.raises(StaleNameError):
        bench.hot.kv(name, 0)


def test_a_pinned_tail_is_left_as_it_is(bench: Bench) -> None:
    """Whoever looks at a half filled page does not see it filled."""
    number = bench.open()
    bench.step(number, 6)
    keys, _ = bench.hot.kv(bench.hot.table.pages(number, 0)[1], 0)
    before = keys.clone()

    bench.step(number, 2)

    assert torch.equal(keys, before)
    bench.look(number)


def test_what_does_not_fit_is_refused(bench: Bench) -> None:
    """Shapes, layers and classes are checked before anything is written."""
    number = bench.open()
    bench.step(number, 2)
    (step,) = bench.hot.table.prepare([StepItem(request=number, before=2, after=4)])
    good = torch.zeros(2, 2, 8), torch.zeros(2, 2, 4)

    with pytest.raises(StaleNameError, match="is not in flight"):
        bench.hot.store(step, 0, *good)
    (seq,) = bench.hot.table.commit([bench.hot.carry_out(step)], S)
    for keys, values in (
        (torch.zeros(3, 2, 8), good[1]),
        (torch.zeros(2, 1, 8), good[1]),
        (torch.zeros(2, 2, 1), good[1]),
        (torch.zeros(2, 2, 8, dtype=torch.float64), good[1]),
        (good[0], torch.zeros(2, 2, 5)),
        (good[0], torch.zeros(2, 2, 4, dtype=torch.complex64)),
    ):
        with pytest.raises(ValueError, match="of shape"):
            bench.hot.store(step, 0, keys, values)
    with pytest.raises(ValueError, match="layer 99"):
        bench.hot.store(step, 99, *good)
    with pytest.raises(ValueError, match="has no rings"):
        bench.hot.window(number, 0, 0, 1)
    with pytest.raises(StaleNameError, match="is not prepared"):
        bench.hot.carry_out(step)
    bench.hot.table.complete({S: [seq]})
    with pytest.raises(StaleNameError, match="is not in flight"):
        bench.hot.store(step, 0, *good)


def test_a_window_is_of_the_head_whatever_is_being_prepared(bench: Bench) -> None:
    """During a move, after it was given up, and in a fork: the old pages, pinned."""
    number = bench.open()
    for _ in range(3):
        bench.step(number, 8)
    index = next(i for i, r in enumerate(bench.arena.regions) if r.spec.name.startswith("a1"))
    child = bench.fork(number)
    wanted = torch.stack(bench.stored[number][-9:])[:, 3, :, :8]
    before = bench.hot.window(number, index, 3, 9)[0]
    assert torch.equal(before, wanted)

    (move,) = bench.hot.table.prepare([StepItem(request=child, before=24, after=25)])
    assert len({source.slot for source, _ in move.copies if source.class_index == index}) > 1
    of_child, _ = bench.hot.window(child, index, 3, 9)
    assert torch.equal(of_child, wanted)
    bench.hot.table.abort([move.number])
    other = bench.open()
    bench.step(other, 8)

    assert torch.equal(of_child, wanted)
    assert torch.equal(bench.hot.window(child, index, 3, 9)[0], wanted)


def test_an_arena_of_another_plan_is_refused() -> None:
    """Pages of one size over slots of another would be read as something else."""
    bench = Bench.build()
    other = compile_program(Program(page_tokens=8, states=plan().program.states), step_tokens=STEP)

    with pytest.raises(ValueError, match="is not of the plan's"):
        HotPages(bench.arena, other)
