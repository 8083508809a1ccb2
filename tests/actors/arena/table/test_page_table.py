"""Transactions of the page table, one behaviour at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import pytest

from actors.arena.table.frontier import MAX_DOMAINS
from actors.arena.table.page_table import PageTable
from actors.arena.table.pages import PageName
from actors.arena.table.steps import Receipt, Step, StepItem
from codec.errors import (
    ArenaFullError,
    CertificateError,
    QuarantinedError,
    ReceiptError,
    StaleNameError,
    VmmBusy,
    VmmClosed,
)
from policies.certificates import verify
from policies.retention.plan import compile_program
from policies.retention.program import AttentionState, Program
from policies.retention.text import parse_relation
from tests.suites.slots import PoolSlots, RingSlots
from tests.suites.table_world import KeptEvents, World, hybrid_plan

S = "stream 0"


@pytest.fixture
def world() -> World:
    """A hybrid of every kind of class."""
    return World.small(with_rings=False)


def started(world: World, tokens: int) -> int:
    """A request that has stored so many tokens, none of its work in flight."""
    number, most = world.open(S), world.plan.step_tokens
    while tokens:
        world.step({number: min(tokens, most)})
        tokens -= min(tokens, most)
    world.drain()
    return number


def test_a_prepared_step_is_invisible(world: World) -> None:
    """Nobody's pages change before the commit."""
    number = started(world, 4)
    before = world.table.pages(number, 0)

    (step,) = world.prepare({number: 2})

    assert world.table.pages(number, 0) == before
    assert world.table.boundary(number) == 4
    world.commit([step])
    assert world.table.boundary(number) == 6
    assert len(world.table.pages(number, 0)) == 2


def test_a_private_tail_is_written_in_place(world: World) -> None:
    """Within a page a step reserves nothing and copies no node."""
    number = started(world, 5)
    nodes = world.table.work.nodes_made

    (step,) = world.step({number: 1})

    assert step.copies == ()
    assert all(world.plan.classes[new.name.class_index].name == "none" for new in step.pages)
    assert world.table.work.nodes_made == nodes


def test_after_a_fork_all_tails_are_copied_together(world: World) -> None:
    """Every class with a half filled page goes on from the same boundary, on either side."""
    number = started(world, 6)
    child = world.table.fork(number)
    world.requests[child] = world.requests[number].copy()
    tails = {world.table.pages(number, i).get(1) for i in range(6)} - {None}

    for which in (number, child):
        (step,) = world.step({which: 1})
        assert tails <= {source for source, _ in step.copies}
        assert step.tails == ()

    world.drain()
    world.look()


def test_one_shared_tail_has_the_others_copied_too() -> None:
    """A pin on one class's page is enough for both classes of the request."""
    world = World.small(with_rings=False)
    number = started(world, 6)
    pinned = world.table.pages(number, 0)[1]
    world.table.pin(pinned)

    (step,) = world.step({number: 1})

    sources = {source.class_index for source, _ in step.copies}
    assert pinned in {source for source, _ in step.copies}
    assert {0, 1} <= sources
    world.table.unpin(pinned)


def test_a_kept_state_is_not_replaced_in_place(world: World) -> None:
    """Also where the boundary leaves no page half full: a snapshot never changes."""
    number = started(world, 24)
    kept = world.table.keep(number)
    world.snapshots[kept] = world.requests[number].copy()

    world.step({number: 3})

    world.drain()
    world.look()


def test_a_page_is_used_again_only_when_its_work_has_ended(world: World) -> None:
    """Dead at the commit, done at the completion, and then with a certificate."""
    number = started(world, 12)
    window = world.table.pages(number, 1)
    first = window[min(window)]
    world.step({number: 4})
    world.step({number: 4})
    assert first not in world.table.pages(number, 1).values()
    assert first not in [c.page for c in world.table.reclaim()]

    one, two = world.running()
    world.complete(*two)
    assert first not in [c.page for c in world.table.reclaim()]
    world.complete(*one)

    found = {c.page: c for c in world.table.reclaim()}
    assert found[first].why == "window"
    assert found[first].tokens == (0, 4)
    assert dict(found[first].done)[S] == two[1]


def test_a_released_request_leaves_its_pages_to_the_work_in_flight(world: World) -> None:
    """Its kernels may still run; nothing is certified before they have."""
    number = started(world, 4)
    world.step({number: 2})
    world.table.reclaim()

    world.table.release(number)
    del world.requests[number]

    assert world.table.reclaim() == []
    world.drain()
    assert {c.why for c in world.table.reclaim()} == {"released"}
    assert world.table.stat().live_pages == 0


def test_a_sibling_goes_on_while_the_shared_page_is_being_copied(world: World) -> None:
    """It may prepare, fork and end: the reference implementation fails on all three."""
    number = started(world, 6)
    sibling = world.table.fork(number)
    world.requests[sibling] = world.requests[number].copy()
    (copying,) = world.step({number: 1})
    assert copying.copies

    grandchild = world.table.fork(sibling)
    world.requests[grandchild] = world.requests[sibling].copy()
    world.step({sibling: 1})
    world.table.release(sibling)
    del world.requests[sibling]

    world.drain()
    world.look()


@pytest.mark.parametrize("verb", ["pin", "register"])
def test_a_held_page_outlives_its_request(world: World, verb: str) -> None:
    """Pinned or registered, it is certified only when it is let go."""
    number = started(world, 3)
    name = world.table.pages(number, 0)[0]
    getattr(world.table, verb)(name)
    world.table.release(number)
    del world.requests[number]

    assert name not in [c.page for c in world.table.reclaim()]
    with pytest.raises(StaleNameError, match="retiring"):
        world.table.pin(name)
    getattr(world.table, f"un{verb}")(name)

    assert [c.page for c in world.table.reclaim()] == [name]
    with pytest.raises(StaleNameError, match="is not in use"):
        getattr(world.table, f"un{verb}")(name)


def test_a_slot_never_has_the_same_name_twice(world: World) -> None:
    """Not even a grant that was aborted is named again."""
    number = world.open(S)
    (step,) = world.prepare({number: 4})
    world.table.abort([step.number])
    world.prepared.clear()

    (again,) = world.prepare({number: 4})

    names = {new.name for new in step.pages}
    assert names.isdisjoint(new.name for new in again.pages)
    assert {name[:2] for name in names} == {new.name[:2] for new in again.pages}


def test_a_batch_without_room_for_its_last_request_takes_nothing() -> None:
    """Whole batches are planned before anything is granted."""
    world = World.small(with_rings=False)
    numbers = [world.open(S) for _ in range(3)]
    world.slots[-1].num_slots = 5  # cross attention needs two pages each

    before = world.state()
    with pytest.raises(ArenaFullError):
        world.prepare(dict.fromkeys(numbers, 3))

    assert world.state() == before
    assert len(world.prepare(dict.fromkeys(numbers[:2], 3))) == 2


def step_item(world: World, number: int, before: int, after: int) -> None:
    """Prepare one step as given."""
    world.table.prepare([StepItem(request=number, before=before, after=after)])


@dataclass(frozen=True)
class Case:
    """A world with a request at work, and a step prepared for another."""

    world: World
    number: int
    step: Step


REFUSALS: dict[str, tuple[type[Exception], Callable[[Case], object]]] = {
    "a request that is not open": (StaleNameError, lambda c: step_item(c.world, 99, 0, 1)),
    "a head that has moved on": (StaleNameError, lambda c: step_item(c.world, c.number, 3, 7)),
    "a step back": (ValueError, lambda c: step_item(c.world, c.number, 4, 4)),
    "a step longer than the plan is for": (
        ValueError,
        lambda c: step_item(c.world, c.number, 4, 11),
    ),
    "a boundary that is no int": (
        TypeError,
        lambda c: step_item(c.world, c.number, 4, 5.0),  # type: ignore[arg-type]
    ),
    "a boundary beyond every position": (
        ValueError,
        lambda c: step_item(c.world, c.number, 4, 2**48),
    ),
    "a domain that is no string": (
        TypeError,
        lambda c: c.world.table.commit([Receipt.of(c.step)], None),  # type: ignore[arg-type]
    ),
    "a step that is not as it was given out": (
        StaleNameError,
        lambda c: c.world.table.need_prepared(replace(c.step, after=9)),
    ),
    "a prepared step, for one in flight": (
        StaleNameError,
        lambda c: c.world.table.need_running(c.step),
    ),
    "a request that has a step prepared": (
        VmmBusy,
        lambda c: step_item(c.world, c.step.request, 0, 1),
    ),
    "a request twice": (
        ValueError,
        lambda c: c.world.table.prepare([StepItem(request=c.number, before=4, after=5)] * 2),
    ),
    "a commit of nothing prepared": (
        StaleNameError,
        lambda c: c.world.table.commit([replace(Receipt.of(c.step), step=98)], S),
    ),
    "a step committed twice": (
        ValueError,
        lambda c: c.world.table.commit([Receipt.of(c.step), Receipt.of(c.step)], S),
    ),
    "a receipt of another epoch": (
        StaleNameError,
        lambda c: c.world.table.commit([replace(Receipt.of(c.step), epoch=7)], S),
    ),
    "a receipt without a page": (
        ValueError,
        lambda c: c.world.table.commit([replace(Receipt.of(c.step), bound=frozenset())], S),
    ),
    "an abort of nothing prepared": (
        StaleNameError,
        lambda c: c.world.table.abort([c.step.number, 98]),
    ),
    "a release of a request with a step prepared": (
        VmmBusy,
        lambda c: c.world.table.release(c.step.request),
    ),
    "a fork of a request with a step prepared": (
        VmmBusy,
        lambda c: c.world.table.fork(c.step.request),
    ),
    "a snapshot of a request with a step prepared": (
        VmmBusy,
        lambda c: c.world.table.keep(c.step.request),
    ),
    "a fork of nothing": (StaleNameError, lambda c: c.world.table.fork(99)),
    "a resume of nothing": (StaleNameError, lambda c: c.world.table.resume(c.number)),
    "a drop of nothing": (StaleNameError, lambda c: c.world.table.drop(c.number)),
    "work that is not running": (
        StaleNameError,
        lambda c: c.world.table.complete({S: [2, 99]}),
    ),
    "a pin of another generation": (
        StaleNameError,
        lambda c: c.world.table.pin(PageName(0, 0, 99)),
    ),
    "a pin of a page that is only reserved": (
        StaleNameError,
        lambda c: c.world.table.pin(c.step.pages[0].name),
    ),
    "an unpin of what is not pinned": (
        StaleNameError,
        lambda c: c.world.table.unpin(c.world.table.pages(c.number, 0)[0]),
    ),
    "an unregister of what is not registered": (
        StaleNameError,
        lambda c: c.world.table.unregister(c.world.table.pages(c.number, 0)[0]),
    ),
    "a recovery with a step prepared": (VmmBusy, lambda c: c.world.table.recover()),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_changes_nothing(world: World, name: str) -> None:
    """And what was refused may be tried again."""
    kind, call = REFUSALS[name]
    number = started(world, 4)
    world.step({number: 4})
    running = world.open(S)
    (step,) = world.prepare({running: 3})
    world.complete(S, 2)
    number = started(world, 4)
    before, events = world.state(), len(world.journal.events)

    with pytest.raises(kind) as caught:
        call(Case(world, number, step))

    assert type(caught.value) is kind
    assert world.state() == before
    assert len(world.journal.events) == events
    world.table.check()
    world.commit([step])


def test_a_journal_that_is_full_stops_everything_and_changes_nothing(world: World) -> None:
    """Without a record nothing may happen; above all, no slot is used again."""
    number = started(world, 12)
    kept = world.table.keep(number)
    name = world.table.pages(number, 0)[0]
    world.table.pin(name)
    (step,) = world.prepare({started(world, 4): 3})
    world.step({number: 4})
    before = world.state()
    world.journal.is_full = True
    calls: list[Callable[[], object]] = [
        world.table.open,
        lambda: world.table.fork(number),
        lambda: world.table.keep(number),
        lambda: world.table.resume(kept),
        lambda: world.table.drop(kept),
        lambda: world.table.release(number),
        lambda: step_item(world, number, 16, 18),
        lambda: world.table.commit([Receipt.of(step)], S),
        lambda: world.table.abort([step.number]),
        lambda: world.table.complete({S: [world.running()[0][1]]}),
        lambda: world.table.pin(name),
        lambda: world.table.unpin(name),
        lambda: world.table.register(name),
    ]

    for call in calls:
        with pytest.raises(CertificateError, match="no space left"):
            call()
        assert world.state() == before
        world.table.check()

    world.journal.is_full = False
    world.commit([step])
    world.drain()
    world.journal.is_full = True
    ready = world.table.stat().retiring_pages
    assert ready
    with pytest.raises(CertificateError, match="no space left"):
        world.table.reclaim()
    assert world.table.stat().retiring_pages == ready


def stray(step: Step) -> list[Receipt]:
    """Receipts that are wrong, each in its own way."""
    good = Receipt.of(step)
    other = PageName(0, 23, 1)
    return [
        replace(good, bound=good.bound | {other}),
        replace(good, copied=good.copied | {(other, other)}),
        replace(good, fault="the copy engine stopped"),
    ]


@pytest.mark.parametrize("which", range(3))
def test_a_wrong_receipt_puts_its_batch_in_quarantine(world: World, which: int) -> None:
    """Not what was asked for was done: nobody knows what the pages hold."""
    number, other = started(world, 6), started(world, 6)
    bystander = started(world, 6)
    steps = world.prepare({number: 3, other: 3})
    doubted = {page.name for s in steps for page in (*s.pages, *s.tails)}

    with pytest.raises(ReceiptError, match=f"step {steps[1].number}"):
        world.table.commit([Receipt.of(steps[0]), stray(steps[1])[which]], S)

    assert world.table.stat().quarantined_pages == len(doubted)
    for request in (number, other):
        assert world.table.boundary(request) == 6
        with pytest.raises(QuarantinedError, match=f"step {steps[1].number}|failed"):
            step_item(world, request, 6, 7)
        world.table.release(request)
        del world.requests[request]
    world.prepared.clear()
    assert doubted.isdisjoint(c.page for c in world.table.reclaim())
    world.step({bystander: 3})
    world.drain()
    world.look()


def test_quarantined_pages_come_back_behind_a_fence(world: World) -> None:
    """Once all that ran at the time has ended, in a new epoch, and certified as such."""
    number, runner = started(world, 4), started(world, 4)
    world.step({runner: 1})
    (step,) = world.prepare({number: 4})
    with pytest.raises(ReceiptError):
        world.table.commit([replace(Receipt.of(step), fault="lost")], S)
    world.prepared.clear()
    (late,) = world.prepare({runner: 1})
    world.commit([late])
    reserved = {new.name for new in step.pages}

    with pytest.raises(VmmBusy, match="is running"):
        world.table.recover()
    (first, _) = world.running()
    world.complete(*first)

    assert world.table.recover() == 2
    assert world.table.stat().quarantined_pages == 0
    found = {c.page: c.why for c in world.table.reclaim()}
    assert {found[name] for name in reserved} == {"recovered"}
    with pytest.raises(QuarantinedError):
        world.table.fork(number)
    with pytest.raises(StaleNameError, match="is not prepared"):
        world.table.commit([Receipt.of(step)], S)
    (after,) = world.prepare({runner: 1})
    assert after.epoch == 2


def test_a_step_costs_what_it_changes_not_what_there_is() -> None:
    """Nodes made by one step of a request of 200 and of 20,000 pages differ by the height."""
    state = AttentionState(
        name="full", layers=(0,), reads=parse_relation("true"), bytes_per_token_layer=2
    )
    plan = compile_program(Program(page_tokens=1, states=(state,)), step_tokens=20_000)
    costs = []
    for tokens in (200, 20_000):
        table = PageTable(plan, [CountingSlots()], KeptEvents())
        number = table.open()
        take(table, number, 0, tokens)
        child = table.fork(number)
        nodes, leaves = table.work.nodes_made, table.work.leaves_counted
        take(table, child, tokens, tokens + 1)
        costs.append((table.work.nodes_made - nodes, table.work.leaves_counted - leaves))

    (few, few_leaves), (many, many_leaves) = costs
    assert few <= 3 <= many <= 6
    assert max(few_leaves, many_leaves) <= 64


class CountingSlots(PoolSlots):
    """More slots than are worth a list."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.next = 0

    def reserve(self, tenant: int, ordinals: object, *, move: bool) -> list[int]:
        """The next ones."""
        found = range(self.next, self.next + len(list(ordinals)))  # type: ignore[call-overload]
        self.next = found.stop
        self.taken.update(found)
        return list(found)


def take(table: PageTable, number: int, before: int, after: int) -> None:
    """One step, committed and completed."""
    steps = table.prepare([StepItem(request=number, before=before, after=after)])
    (seq,) = table.commit([Receipt.of(step) for step in steps], S)
    table.complete({S: [seq]})


def test_a_ring_that_another_reader_holds_is_left_for_a_new_one() -> None:
    """A sliding window goes on in memory of its own: every live page is copied over."""
    state = AttentionState(
        name="w", layers=(0,), reads=parse_relation("q - k < 8"), bytes_per_token_layer=2
    )
    plan = compile_program(Program(page_tokens=4, states=(state,)), step_tokens=4)
    (found,) = plan.classes
    assert found.address.cells is not None
    slots = RingSlots(3, found.address.cells)
    world = World(plan, [slots])
    number = started(world, 8)
    held = world.table.pages(number, 0)[0]
    world.table.pin(held)

    steps = [world.step({number: 4})[0] for _ in range(3)]

    moved = [step for step in steps if len(step.copies) > 1]
    assert len(moved) == 1
    assert {name.slot // slots.cells for name in world.table.pages(number, 0).values()} == {1}
    world.drain()
    world.look()
    world.table.unpin(held)
    world.end()


def test_the_journal_has_every_event_before_its_effect(world: World) -> None:
    """One scripted life, event by event."""
    number = started(world, 4)
    child = world.table.fork(number)
    world.requests[child] = world.requests[number].copy()
    world.table.release(number)
    del world.requests[number]
    kept = world.table.keep(child)
    world.table.drop(kept)
    world.end()

    names = [event for event, _ in world.journal.events]

    assert names[:4] == ["open", "reserve", "commit", "complete"]
    assert names[4:9] == ["fork", "release", "keep", "drop", "release"]
    assert names[9] == "recover"
    assert set(names[10:]) == {"reuse"}
    granted = [tuple(p) for e, f in world.journal.events if e == "reserve" for p in f["pages"]]
    assert len(granted) == names.count("reuse")


def test_there_are_only_so_many_domains(world: World) -> None:
    """Each certificate names them all; who makes one per request is told."""
    number = world.open(S)
    for nth in range(MAX_DOMAINS):
        (step,) = world.prepare({number: 1})
        (seq,) = world.table.commit([Receipt.of(step)], f"stream {nth}")
        world.table.complete({f"stream {nth}": [seq]})
    (step,) = world.prepare({number: 1})

    with pytest.raises(ValueError, match="there are 64 already"):
        world.table.commit([Receipt.of(step)], "one more")

    world.table.commit([Receipt.of(step)], "stream 7")


def test_nobody_reads_a_page_that_is_about_to_be_written(world: World) -> None:
    """A pin between prepare and commit comes too late for a copy, so it is refused."""
    number = started(world, 6)
    (step,) = world.prepare({number: 1})
    assert step.tails
    names = world.table.pages(number, 0)

    for tail in step.tails:
        with pytest.raises(VmmBusy, match=f"prepared step {step.number} writes into it"):
            world.table.pin(tail.name)
    with pytest.raises(VmmBusy):
        world.table.pin_pages(number, 0)
    world.table.pin(names[0])
    world.table.unpin(names[0])
    world.commit([step])

    boundary, pinned = world.table.pin_pages(number, 0)
    assert (boundary, pinned) == (7, names)
    for name in pinned.values():
        world.table.unpin(name)
    with pytest.raises(StaleNameError, match="has no pin"):
        world.table.unpin(names[1])


def test_a_finaliser_whose_record_fails_tries_again(world: World) -> None:
    """A full disk once must not keep a page for ever, nor fail somebody else's call."""
    number = started(world, 3)
    name = world.table.pages(number, 0)[0]
    world.table.pin(name)
    world.journal.is_full = True

    world.table.unpin_soon(name)
    assert world.table.boundary(number) == 3

    world.journal.is_full = False
    world.table.release(number)
    del world.requests[number]
    assert name in [c.page for c in world.table.reclaim()]


def test_an_iterator_may_use_the_table(world: World) -> None:
    """Arguments are taken before the turn, or this would wait for itself."""
    number = world.open(S)

    (step,) = world.table.prepare(
        StepItem(request=n, before=world.table.boundary(n), after=2) for n in [number]
    )
    (seq,) = world.table.commit(
        (Receipt.of(s) for s in [step] if world.table.boundary(number) == 0), S
    )

    world.table.complete({S: [seq]})
    assert world.table.boundary(number) == 2


class RefusingSlots(PoolSlots):
    """Refuses to let a tenant leave, as the regions of a closed arena do."""

    def leave(self, tenant: int) -> None:
        """Not now."""
        raise VmmClosed("arena")


def test_a_release_that_fails_has_changed_nothing() -> None:
    """It may be tried again."""
    world = World.small(with_rings=False)
    last = len(world.slots) - 1
    world.table._slots = (*world.slots[:last], RefusingSlots(24))
    number = started(world, 3)
    before, events = world.state(), len(world.journal.events)

    with pytest.raises(VmmClosed):
        world.table.release(number)

    assert world.state() == before
    assert len(world.journal.events) == events


class BrokenSlots(PoolSlots):
    """Fails when slots come back."""

    is_broken = False

    def free(self, slots: Iterable[int]) -> None:
        """See `PoolSlots.free`."""
        if self.is_broken:
            raise OSError(5, "input/output error")
        super().free(slots)


def test_what_was_certified_is_never_certified_again() -> None:
    """Not even if the slots could not be given back: better lost than named twice."""
    plan = hybrid_plan()
    slots = [BrokenSlots(24) for _ in plan.classes]
    world = World(plan, slots)
    number = started(world, 3)
    slots[2].is_broken = True
    world.table.release(number)

    with pytest.raises(OSError, match="input/output"):
        world.table.reclaim()

    slots[2].is_broken = False
    assert world.table.reclaim() == []
    verify(world.journal.lines)


def test_pages_are_pinned_together_or_not_at_all(world: World) -> None:
    """Also where the record of it fails: a page pinned by nobody would stay for ever."""
    number = started(world, 12)
    world.journal.is_full = True

    with pytest.raises(CertificateError):
        world.table.pin_pages(number, 0)

    world.journal.is_full = False
    for name in world.table.pages(number, 0).values():
        with pytest.raises(StaleNameError, match="has no pin"):
            world.table.unpin(name)


def test_as_many_pins_are_undone_as_there_are(world: World) -> None:
    """A name given twice counts twice, and what is refused changes nothing."""
    number = started(world, 3)
    name = world.table.pages(number, 0)[0]
    world.table.pin(name)

    world.table.unpin_soon(name, name)
    world.table.unpin(name)

    with pytest.raises(StaleNameError, match="has no pin"):
        world.table.unpin(name)
