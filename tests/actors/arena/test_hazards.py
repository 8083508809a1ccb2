"""What goes wrong with memory that comes and goes, and what our code does about each.

Where the danger is a crash it is shown in a process of its own, at the level of the driver,
which promises nothing else; the arena above it promises that it cannot happen.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.arena import syscalls
from actors.arena.arena import Lease
from actors.arena.driver import Access, Span
from actors.arena.driver_host import HostVmmDriver
from actors.arena.ring_region import RingRegion
from actors.arena.table.pages import PageName
from actors.arena.table.steps import StepItem
from codec.errors import StaleLeaseError, StaleNameError, VmmBusy, VmmError
from tests.actors.arena.test_hot_pages import GRANULE, Bench
from tests.suites.probes import is_readable

ROOT = Path(__file__).parents[3]
LAYER, RING_LAYER = 0, 3
HANG_S = 300.0
BLOB = bytes(range(1, 200)) * 40


@dataclass(frozen=True)
class End:
    """How a process ended."""

    code: int
    """Minus the signal that ended it, if one did."""

    said: str
    complained: str


def run(script: str, *, fds: tuple[int, ...] = ()) -> End:
    """``script`` run in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        pass_fds=fds,
        timeout=HANG_S,
    )
    return End(done.returncode, done.stdout, done.stderr)


FORKS = """
import json, os, sys, tempfile
import tests.actors.arena.test_hazards  # once for all of them: it takes long
ends = {}
for name, script in json.load(sys.stdin).items():
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as complained:
        child = os.fork()
        if child == 0:
            os.dup2(said.fileno(), 1)
            os.dup2(complained.fileno(), 2)
            exec(compile(script, name, "exec"), globals())
            sys.exit(0)
        _, status = os.waitpid(child, 0)
        texts = []
        for file in (said, complained):
            file.seek(0)
            texts.append(file.read())
        ends[name] = (os.waitstatus_to_exitcode(status), *texts)
json.dump(ends, sys.stdout)
"""


@pytest.fixture(scope="module")
def ends() -> dict[str, End]:
    """How each of `SCRIPTS` ended, each in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        input=json.dumps(SCRIPTS),
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_S,
    )
    return {name: End(*how) for name, how in json.loads(done.stdout).items()}


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Hot pages that end with no bytes, nothing mapped and no open file."""
    bench = Bench.build()
    yield bench
    gc.collect()
    for number in bench.stored:
        bench.hot.table.release(number)
    bench.hot.table.reclaim()
    bench.arena.check()
    bench.arena.close()
    assert bench.driver.physical().measured_bytes == 0
    bench.driver.close()


def begin(bench: Bench, size: int = 6) -> int:
    """A request of that many tokens."""
    number = bench.open()
    bench.step(number, size)
    return number


def end(bench: Bench, number: int) -> None:
    """The request ends, and all that can go goes: to others, and then to the system."""
    bench.hot.table.release(number)
    del bench.stored[number]
    bench.hot.table.reclaim()
    for _ in range(3):
        end_soon = begin(bench, 8)
        bench.hot.table.release(end_soon)
        del bench.stored[end_soon]
    bench.hot.table.reclaim()
    bench.arena.trim()


def ring_of(bench: Bench) -> tuple[int, RingRegion]:
    """The class whose window is 10 tokens, and its region."""
    for index, region in enumerate(bench.arena.regions):
        if isinstance(region, RingRegion) and RING_LAYER in region.spec.layers:
            return index, region
    raise AssertionError("no ring has the layer")


# What a user may keep: each returns a tensor over memory of `number`, or of a lease.


def a_page(bench: Bench, number: int) -> torch.Tensor:
    """Keys of a page in a pool, typed."""
    keys, _ = bench.hot.kv(bench.hot.table.pages(number, 0)[0], LAYER)
    return keys[1:3, 1]


def a_ring_page(bench: Bench, number: int) -> torch.Tensor:
    """Values of a page in a ring, typed."""
    index, _ = ring_of(bench)
    _, values = bench.hot.kv(bench.hot.table.pages(number, index)[0], RING_LAYER)
    return values.view(torch.uint8)[1]


def a_window(bench: Bench, number: int) -> torch.Tensor:
    """Keys of a window of a ring."""
    keys, _ = bench.hot.window(number, ring_of(bench)[0], RING_LAYER, 6)
    return keys.transpose(0, 1)


def a_token(bench: Bench, number: int) -> torch.Tensor:
    """One token, gathered."""
    return bench.hot.gather(number, LAYER)[2][1]


def a_whole_ring(bench: Bench, number: int) -> torch.Tensor:
    """What a whole ring, to append to, shows of its last tokens."""
    keys, _ = ring_of(bench)[1].rings(number, RING_LAYER, num_tokens=6)
    return keys.last(4)


def a_lease(bench: Bench, number: int) -> torch.Tensor:
    """A view of a blob, which ends while it is kept."""
    del number
    lease = bench.arena.reserve(len(BLOB))
    view = bench.arena.view(lease)
    view[:] = BLOB
    bench.arena.release(lease)
    return torch.frombuffer(view, dtype=torch.uint8)[5:]


KEPT = (a_page, a_ring_page, a_window, a_token, a_whole_ring, a_lease)


@pytest.mark.parametrize("keep", KEPT)
def test_what_is_kept_shows_its_own_bytes_for_ever(
    bench: Bench, keep: Callable[[Bench, int], torch.Tensor]
) -> None:
    """After its request or lease, through others and `trim`; and then it is gone for good."""
    number = begin(bench)
    kept = keep(bench, number)
    wanted, va = kept.clone(), kept.data_ptr()

    end(bench, number)

    assert torch.equal(kept, wanted)
    assert is_readable(va)
    with pytest.raises(VmmBusy):
        bench.arena.close()
    del kept
    gc.collect()
    bench.hot.table.reclaim()
    bench.arena.trim()
    assert not is_readable(va)


CRASH = """
from actors.arena.driver import Access, Span
from actors.arena.driver_host import HostVmmDriver
driver = HostVmmDriver(4 * 4096, 4096)
va = driver.reserve(4096)
driver.map(va, driver.create(4096))
driver.set_access([Span(va, 4096)], Access.READ_WRITE)
tensor = driver.tensor(va, 4096, None)
tensor.fill_(7)
print(int(tensor.sum()), flush=True)
"""
CRASHES = {
    "a read of what is unmapped": "driver.unmap(va); print(tensor.sum())",
    "a write to what is only to be read": """
driver.set_access([Span(va, 4096)], Access.READ)
assert int(tensor.sum()) == 7 * 4096
tensor.fill_(8)
""",
}


@pytest.mark.parametrize("how", CRASHES)
def test_the_driver_alone_lets_a_reader_die(ends: dict[str, End], how: str) -> None:
    """The danger is real: a tensor does not keep what is below it."""
    assert ends[how] == End(-signal.SIGSEGV, f"{7 * 4096}\n", "")


def test_a_window_during_a_move_is_of_the_pages_that_the_request_has(bench: Bench) -> None:
    """Not of those it moves to, which nobody has written; so too when the move is undone."""
    number = begin(bench)
    child = bench.fork(number)
    (step,) = bench.hot.table.prepare([StepItem(request=number, before=6, after=8)])
    assert step.copies

    kept = a_window(bench, number)
    bench.hot.table.abort([step.number])
    begin(bench, 8)

    wanted = torch.stack(bench.stored[child])[:, RING_LAYER, :, :8].transpose(0, 1)
    assert torch.equal(kept, wanted)


def test_memory_under_a_bare_name_cannot_be_read(bench: Bench) -> None:
    """Addresses that no page has are no memory, though they stay reserved."""
    number = begin(bench)
    name = bench.hot.table.pages(number, 0)[0]
    region = bench.arena.regions[0]
    assert not isinstance(region, RingRegion)
    va = region.span(name.slot).va
    assert is_readable(va)

    end(bench, number)

    assert not is_readable(va)
    with pytest.raises(ValueError, match="holds no page"):
        region.rows(name.slot, 0)


def stale_name(bench: Bench) -> tuple[PageName, PageName]:
    """The name of a page that was, and that of the page which has its slot now."""
    number = begin(bench)
    old = bench.hot.table.pages(number, 0)[0]
    bench.hot.table.release(number)
    del bench.stored[number]
    bench.hot.table.reclaim()
    new = bench.hot.table.pages(begin(bench), 0)[0]
    assert new[:2] == old[:2]
    return old, new


def test_a_slot_used_again_is_another_page(bench: Bench) -> None:
    """At the same address: only the generation tells, and every verb asks for it."""
    old, new = stale_name(bench)
    table = bench.hot.table
    before = table.stat()

    assert new.generation == old.generation + 1
    verbs: list[Callable[[PageName], object]] = [
        table.pin,
        table.unpin,
        table.register,
        table.unregister,
        lambda name: bench.hot.kv(name, LAYER),
    ]
    for verb in verbs:
        with pytest.raises(StaleNameError):
            verb(old)

    assert table.stat() == before


def test_a_lease_of_the_same_bytes_is_another_lease(bench: Bench) -> None:
    """Its predecessor is refused by every verb that takes one, and looks at nothing."""
    arena = bench.arena
    old = arena.reserve(len(BLOB))
    arena.release(old)
    new = arena.reserve(len(BLOB))
    arena.view(new)[:] = BLOB

    assert (new.offset_bytes, new.nbytes) == (old.offset_bytes, old.nbytes)
    verbs: list[Callable[[Lease], object]] = [arena.release, arena.pin, arena.unpin, arena.view]
    for verb in verbs:
        with pytest.raises(StaleLeaseError):
            verb(old)
    arena.abandon(old)

    assert (arena.is_held(old), arena.is_held(new)) == (False, True)
    assert bytes(arena.view(new)) == BLOB
    arena.release(new)


def test_a_stale_name_is_refused_before_there_is_an_address(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is not even asked for a tensor."""
    old, new = stale_name(bench)
    lease = bench.arena.reserve(1)
    bench.arena.release(lease)
    shown: list[int] = []
    real = bench.driver.tensor

    def tensor(va: int, nbytes: int, owner: object) -> torch.Tensor:
        shown.append(va)
        return real(va, nbytes, owner)

    monkeypatch.setattr(bench.driver, "tensor", tensor)
    with pytest.raises(StaleNameError):
        bench.hot.kv(old, LAYER)
    with pytest.raises(StaleLeaseError):
        bench.arena.view(lease)

    assert not shown
    bench.hot.kv(new, LAYER)
    assert shown


def test_memory_is_given_back_only_when_nothing_maps_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To punch a hole under a mapping would turn its bytes into zeros, and say nothing."""
    real, holes = syscalls.punch, list[int]()

    def punch(fd: int, offset: int, nbytes: int) -> None:
        inode = str(os.fstat(fd).st_ino)
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, _, start, _, found = line.split(maxsplit=5)[:5]
            first, stop = (int(it, 16) for it in addresses.split("-"))
            begins, ends = int(start, 16), int(start, 16) + stop - first
            assert found != inode or ends <= offset or offset + nbytes <= begins
        holes.append(nbytes)
        real(fd, offset, nbytes)

    monkeypatch.setattr(syscalls, "punch", punch)
    number = begin(bench)
    lease = bench.arena.reserve(len(BLOB))
    bench.arena.view(lease)[:] = BLOB
    end(bench, bench.fork(number))
    bench.look(number)
    bench.arena.release(lease)
    bench.arena.trim()

    assert sum(holes) >= len(BLOB)
    bench.look(number)


def test_a_handle_that_is_released_keeps_its_bytes_while_it_is_mapped() -> None:
    """They go with the last mapping, and the driver's books with them."""
    driver = HostVmmDriver(4 * GRANULE, GRANULE)
    va = driver.reserve(2 * GRANULE)
    handle = driver.create(GRANULE)
    for at in (va, va + GRANULE):
        driver.map(at, handle)
    driver.set_access([Span(va, 2 * GRANULE)], Access.READ_WRITE)
    driver.copy_in(va, BLOB[:GRANULE])

    driver.release(handle)
    driver.unmap(va)

    assert driver.copy_out(va + GRANULE, GRANULE) == BLOB[:GRANULE]
    assert driver.physical().measured_bytes == GRANULE
    driver.unmap(va + GRANULE)
    assert driver.physical().measured_bytes == 0
    assert not is_readable(va)
    driver.close()


@pytest.mark.skipif(find_spec("ucxx") is None, reason="needs ucxx")
def test_what_is_evicted_while_ucx_sends_it_arrives_as_it_was() -> None:
    """UCX reads the memory from a thread of its own: there a missing page ends the process."""
    script = """
import asyncio, gc, os
os.environ.update(UCX_TLS="tcp,self", UCX_NET_DEVICES="lo", UCX_WARN_UNUSED_ENV_VARS="n")
from actors.transport.deadlines import Deadlines
from actors.transport.link_ucx import UcxLink, UcxListener, shutdown
from actors.transport.wire_ucx import UcxWire
from tests.actors.transport.samples import key
from tests.actors.transport.test_worker_transfer import CODEC, blob, new_worker
from tests.suites.probes import is_readable

SIZE = 1 << 20
source, sink = (new_worker(node, num_extents=100) for node in ("right", "left"))
old = blob(1, SIZE)
source.put(old)
arena = source._arena
(lease,) = source._leases.values()
va = arena.base_va + lease.offset_bytes
send = UcxWire.send_payload
evicted = []

async def send_and_evict(self, view, **details):
    sending = asyncio.ensure_future(send(self, view, **details))
    await asyncio.sleep(0)
    assert not sending.done()
    source.evict(key(1), CODEC)
    arena.trim()
    source.put(blob(2, SIZE))
    assert is_readable(va)
    assert source.stat().used_bytes == source.stat().stored_bytes + len(old)
    evicted.append(va)
    await sending

async def main():
    UcxWire.send_payload = send_and_evict
    patience = Deadlines(connect_s=60, frame_s=60, payload_s=60, total_s=120)
    listener = UcxListener(source, node="right", incarnation=77, deadlines=patience)
    wants, link = [(key(1), CODEC)], UcxLink(node="left")
    try:
        port = await listener.start()
        report = await link.pull(
            "127.0.0.1", port, wants, sink, patience, node="right", incarnation=77
        )
        assert [line.outcome.name for line in report.outcomes] == ["DELIVERED"]
    finally:
        await listener.close()
        await shutdown()

asyncio.run(main())
gc.collect()
assert evicted == [va]
with sink.get(key(1), CODEC) as pin:
    assert bytes(pin.view) == old
assert source.stat().used_bytes == source.stat().stored_bytes
source.evict(key(2), CODEC)
arena.trim()
assert not is_readable(va)
print("arrived")
"""
    done = run(script)

    assert done.said.splitlines()[-1:] == ["arrived"], done.complained
    assert done.code == 0


WORLD = """
import atexit, gc, os, sys
import numpy as np
import torch
from tests.actors.arena.test_hazards import *

torch.manual_seed(0)
bench = Bench.build()
arena, hot, table = bench.arena, bench.hot, bench.hot.table
number = begin(bench)
lease = arena.reserve(len(BLOB))
view = arena.view(lease)
view[:] = BLOB
index, region = ring_of(bench)
name = table.pages(number, 0)[0]
kept = [keep(bench, number) for keep in KEPT]
"""


FORK = """
from codec.errors import VmmForked
shadow = [tensor.clone() for tensor in kept]
before = (arena.stat(), table.stat(), bench.driver.physical())
step = StepItem(request=number, before=6, after=7)
verbs = [
    lambda: arena.reserve(1), lambda: arena.release(lease), lambda: arena.view(lease),
    lambda: arena.pin(lease), lambda: arena.unpin(lease), lambda: arena.is_held(lease),
    arena.trim, lambda: arena.release_idle(0), arena.stat, arena.close, arena.check,
    table.open, lambda: table.fork(number), lambda: table.keep(number),
    lambda: table.release(number), lambda: table.prepare([step]), lambda: table.commit([], "s"),
    lambda: table.abort([]), lambda: table.complete({}), lambda: table.pin(name),
    lambda: table.unpin(name), lambda: table.register(name), lambda: table.unregister(name),
    table.reclaim, table.recover, lambda: table.pages(number, 0), table.stat, table.check,
    lambda: hot.kv(name, 0), lambda: hot.gather(number, 0), lambda: hot.window(number, index, 3, 2),
    lambda: region.reserve(9, [0]), lambda: region.free([0]), lambda: region.leave(number),
    lambda: region.rows(0, 0), lambda: region.copy(0, 1), lambda: region.rings(number, 3),
    lambda: arena.regions[0].rows(0, 0), lambda: arena.regions[0].reserve(9, [0]),
    lambda: arena.regions[0].free([0]), bench.driver.close,
]
child = os.fork()
if child == 0:
    missed = len(verbs)
    for verb in verbs:
        try:
            verb()
        except VmmForked:
            missed -= 1
    arena.abandon(lease)
    table.unpin_soon(name)
    del verb, verbs, kept, view, arena, hot, table, region, bench
    gc.collect()
    sys.exit(missed)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert (arena.stat(), table.stat(), bench.driver.physical()) == before
assert all(torch.equal(*pair) for pair in zip(kept, shadow))
assert bytes(view) == BLOB
bench.look(number)
bench.step(number, 2)
bench.look(number)
view.release()
kept.clear()
arena.release(lease)
table.release(number)
table.reclaim()
arena.trim()
assert bench.driver.physical().measured_bytes == 0, bench.driver.physical()
arena.close()
bench.driver.close()
print("intact")
"""


def test_a_forked_child_leaves_its_parents_memory_alone(ends: dict[str, End]) -> None:
    """Its verbs are refused, and neither its finalisers nor its exit give anything back."""
    assert ends["a fork"] == End(0, "intact\n", "")


ENDS = {
    "nothing is closed": "",
    "the arena would not close": """
try:
    arena.close()
except VmmBusy:
    print("busy")
""",
    "all is closed": """
view.release()
del view
kept.clear()
gc.collect()
table.reclaim()
arena.close()
bench.driver.close()
""",
    "the arena is closed, its driver is not": """
del view
kept.clear()
gc.collect()
arena.close()
""",
    "only tensors are left": "del bench, arena, hot, table, region, view; gc.collect()",
    "they are used at exit": """
shadow = [tensor.clone() for tensor in kept]
atexit.register(lambda: print(all(torch.equal(*pair) for pair in zip(kept, shadow))))
del kept[0], shadow[0]
""",
    "the arena is used at exit": """
atexit.register(lambda: print(bytes(arena.view(lease)) == BLOB, arena.trim() >= 0))
""",
    "a DLPack capsule is not consumed": "capsule = torch.utils.dlpack.to_dlpack(kept[0])",
    "NumPy has it by DLPack": """
arrays = [np.from_dlpack(tensor) for tensor in kept]
del kept, view, bench, arena, hot, table, region
""",
    "torch has it by DLPack": """
array = np.asarray(view)
tensors = [torch.from_dlpack(np.from_dlpack(kept[0])), torch.from_dlpack(array)]
del kept, view, array
""",
    "they are in a cycle": """
class Cycle: ...
cycle = Cycle()
cycle.me, cycle.kept, cycle.arena, cycle.view = cycle, kept, arena, view
gc.disable()
del cycle, kept, view, bench, arena, hot, table, region
""",
    "a module that goes late has them": """
import builtins
builtins.kept, builtins.view = kept, view
sys.modules["late"] = type(sys)("late")
sys.modules["late"].kept = kept
""",
    "a thread has them": """
import threading
started = threading.Event()
def hold(kept, view):
    started.set()
    threading.Event().wait()
threading.Thread(target=hold, args=(kept, view), daemon=True).start()
started.wait()
""",
    "an exit in the middle of a step": """
(step,) = table.prepare([StepItem(request=number, before=6, after=8)])
sys.exit(0)
""",
}


@pytest.mark.parametrize("how", ENDS)
def test_a_process_ends_well_whatever_it_still_holds(ends: dict[str, End], how: str) -> None:
    """A finaliser that ran when Python is gone would kill it, or complain."""
    said = {"the arena would not close": "busy\n", "they are used at exit": "True\n"}
    said["the arena is used at exit"] = "True True\n"

    assert ends[how] == End(0, said.get(how, ""), "")


SCRIPTS = {
    **{name: CRASH + script for name, script in CRASHES.items()},
    "a fork": WORLD + FORK,
    **{name: WORLD + script for name, script in ENDS.items()},
}


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_peer_cannot_cut_the_memory(is_writable: bool) -> None:
    """Whoever touched a page that was cut off would die of SIGBUS; the seals refuse it."""
    driver = HostVmmDriver(4 * GRANULE, GRANULE)
    va = driver.reserve(GRANULE)
    handle = driver.create(GRANULE)
    driver.map(va, handle)
    driver.set_access([Span(va, GRANULE)], Access.READ_WRITE)
    driver.copy_in(va, BLOB[:GRANULE])
    share = driver.export(handle, writable=is_writable)
    script = f"""
import os
for fd in ({share.fd}, os.open("/proc/self/fd/{share.fd}", os.O_RDWR)):
    for length in (0, {share.offset_bytes}, 1 << 30):
        try:
            os.ftruncate(fd, length)
        except OSError:
            continue
        print("cut to", length)
print("tried")
"""

    done = run(script, fds=(share.fd,))

    assert done == End(0, "tried\n", "")
    assert driver.copy_out(va, GRANULE) == BLOB[:GRANULE]
    share.close()
    driver.close()


def test_a_tensor_is_shown_without_a_capsule_of_ours(bench: Bench) -> None:
    """A hand-made DLPack capsule would be freed after Python is gone; ours are arrays."""
    number = begin(bench)
    kept = a_page(bench, number)

    again = torch.from_dlpack(np.from_dlpack(kept))

    assert again.data_ptr() == kept.data_ptr()
    wanted = kept.clone()
    del kept
    end(bench, number)
    assert torch.equal(again, wanted)


def test_a_refused_map_leaves_the_page_that_is_there(bench: Bench) -> None:
    """No verb of the driver puts memory over memory."""
    number = begin(bench)
    region = bench.arena.regions[0]
    assert not isinstance(region, RingRegion)
    va = region.span(0).va // GRANULE * GRANULE
    handle = bench.driver.create(GRANULE)

    with pytest.raises(VmmError):
        bench.driver.map(va, handle)

    bench.driver.release(handle)
    bench.look(number)
