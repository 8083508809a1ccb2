"""`CudaVmmDriver` over the stand-in for ``libcuda``: the contract, the model, what is CUDA's."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.arena.calls_cuda import CudaCalls
from actors.arena.driver import Access
from actors.arena.driver_cuda import CudaVmmDriver
from actors.arena.driver_host import HostVmmDriver
from actors.arena.syscalls import PAGE_BYTES
from codec.errors import (
    BackendUnavailable,
    VmmBusy,
    VmmDriverError,
    VmmMisaligned,
    VmmNotShared,
    VmmOutOfMemory,
)
from tests.fakes.cuda_fake import DEVICE_NAME, FakeCuda, fake_cuda
from tests.suites.device_trace import read_trace
from tests.suites.driver_contract import CAPACITY_GRANULES, Rig, set_open, walk_contract
from tests.suites.driver_machine import DriverMachine
from tests.suites.driver_suite import DriverSuite, TensorSuite
from tests.suites.quiet import QUIET_STATEFUL

ROOT = Path(__file__).parents[3]
GRANULE = 1 << 16


def make_cuda_driver(capacity_granules: int = CAPACITY_GRANULES) -> CudaVmmDriver:
    """A driver over the stand-in, with granules that are cheap to zero."""
    fake_cuda().size(GRANULE)
    return CudaVmmDriver(0, capacity_bytes=capacity_granules * GRANULE)


class TestCudaVmmDriver(DriverSuite):
    """The contract."""

    def make_driver(self, capacity_granules: int) -> CudaVmmDriver:
        """See `make_cuda_driver`."""
        return make_cuda_driver(capacity_granules)


class TestCudaTensors(TensorSuite):
    """Tensors on the stand-in, were torch to believe in its device."""

    @pytest.fixture(autouse=True)
    def need_a_device(self) -> None:
        """Torch asks its own library for the device, and that one knows of none."""
        pytest.skip("torch cannot reach the stand-in's memory: see tests/gpu")

    def make_driver(self, capacity_granules: int) -> CudaVmmDriver:
        """See `make_cuda_driver`."""
        return make_cuda_driver(capacity_granules)


class CudaMachine(DriverMachine):
    """The model."""

    def make_driver(self, capacity_granules: int) -> CudaVmmDriver:
        """See `make_cuda_driver`."""
        return make_cuda_driver(capacity_granules)

    def teardown(self) -> None:
        """The books agree with each other, and nothing is left."""
        if hasattr(self, "driver"):
            assert isinstance(self.driver, CudaVmmDriver)
            self.driver.check()
        super().teardown()
        assert not any(fake_cuda().live().values())


TestCudaMachine = CudaMachine.TestCase
TestCudaMachine.settings = QUIET_STATEFUL


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    """The stand-in, in which nothing lives before or after the test."""
    fake = fake_cuda()
    fake.size(GRANULE)
    assert not any(fake.live().values())
    yield fake
    fake.heal()
    assert not any(fake.live().values())


@pytest.fixture
def driver(fake: FakeCuda) -> Iterator[CudaVmmDriver]:
    """A driver of 8 granules whose invariants are checked after the test."""
    driver = make_cuda_driver()
    yield driver
    fake.heal()
    driver.check()
    driver.close()


@pytest.fixture
def rig(driver: CudaVmmDriver) -> Iterator[Rig]:
    """The driver at work."""
    rig = Rig.build(driver)
    yield rig
    rig.undo()


def test_host_and_cuda_answer_alike(fake: FakeCuda) -> None:
    """The walk's trace is one, whatever the memory; that of a device too, once recorded."""
    host = walk_contract(HostVmmDriver(CAPACITY_GRANULES * PAGE_BYTES, PAGE_BYTES))

    assert walk_contract(make_cuda_driver()) == host


def test_a_device_answered_alike(fake: FakeCuda) -> None:
    """The trace that was recorded on a device, if any was."""
    recorded = read_trace()
    if recorded is None:
        pytest.skip("no device has been asked yet: run tests.gpu.record_trace on one")

    assert DEVICE_NAME not in recorded["device"]
    assert walk_contract(make_cuda_driver()) == recorded["trace"]


def test_what_it_can_do_is_asked_of_the_device(fake: FakeCuda) -> None:
    """The granule is not ours to choose; a budget must be made of it."""
    fake.size(2 << 20)
    driver = CudaVmmDriver(1, capacity_bytes=4 << 20, gpu_direct_rdma=True)

    caps = driver.caps()

    assert (caps.kind, caps.torch_device) == ("cuda", "cuda:1")
    assert caps.granule_min_bytes == caps.granule_recommended_bytes == 2 << 20
    assert (caps.capacity_bytes, caps.exports) == (4 << 20, {"fd"})
    driver.close()
    with pytest.raises(VmmMisaligned, match="capacity_bytes"):
        CudaVmmDriver(0, capacity_bytes=3 << 20)


def test_a_device_that_is_not_there_is_told_by_its_number(fake: FakeCuda) -> None:
    """Nothing is taken for it."""
    with pytest.raises(BackendUnavailable, match="device 7"):
        CudaVmmDriver(7, capacity_bytes=GRANULE)


@pytest.mark.parametrize("code", [800, 801])
def test_where_memory_cannot_be_shared_there_is_memory_all_the_same(
    fake: FakeCuda, code: int
) -> None:
    """The driver says so when the first memory is committed; then no handle type is asked for."""
    fake.fail("cuMemCreate", 1, code)

    driver = make_cuda_driver()

    assert driver.caps().exports == frozenset()
    handle = driver.create(GRANULE)
    with pytest.raises(VmmNotShared):
        driver.export(handle)
    driver.close()


@pytest.mark.parametrize("code", [1, 999])
def test_any_other_refusal_of_the_first_memory_is_an_error(fake: FakeCuda, code: int) -> None:
    """To carry on without would hide it."""
    fake.fail("cuMemCreate", 1, code)

    with pytest.raises(VmmDriverError) as caught:
        make_cuda_driver()

    assert (caught.value.call, caught.value.code) == ("cuMemCreate", code)


def test_a_full_device_is_told_from_a_full_budget(fake: FakeCuda, driver: CudaVmmDriver) -> None:
    """The remedy is another: here, somebody else has the memory."""
    fake.size(GRANULE, total_bytes=2 * GRANULE)

    with pytest.raises(VmmOutOfMemory, match="of the device") as caught:
        driver.create(3 * GRANULE)

    assert caught.value.free_bytes == CAPACITY_GRANULES * GRANULE


def test_zeroing_waits_for_nobodys_work_but_its_own(fake: FakeCuda, driver: CudaVmmDriver) -> None:
    """One memset and one wait, on its own stream: a wait for the device would stall a model."""
    before = [fake.calls(name) for name in ("cuMemsetD8Async", "cuCtxSynchronize")]

    driver.release(driver.create(GRANULE))

    after = [fake.calls(name) for name in ("cuMemsetD8Async", "cuCtxSynchronize")]
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 0]


def test_tickets_are_events_that_go_when_done(fake: FakeCuda, driver: CudaVmmDriver) -> None:
    """A ticket that is done stays so, without asking again."""
    ticket = driver.record()
    fake.hold_events(2)
    assert fake.live()["events"] == 1

    assert [driver.done(ticket) for _ in range(4)] == [False, False, True, True]

    assert fake.live()["events"] == 0


def test_waiting_asks_until_it_is_done_or_time_is_up(fake: FakeCuda, driver: CudaVmmDriver) -> None:
    """No time at all is one question."""
    ticket = driver.record(stream=2)
    fake.hold_events(5)

    assert not driver.wait(ticket, timeout_s=0)
    assert driver.wait(ticket, timeout_s=60)


def test_work_that_failed_is_not_done(fake: FakeCuda, driver: CudaVmmDriver) -> None:
    """A fault of a kernel shows when its ticket is asked for, as what it is."""
    ticket = driver.record()
    fake.fail("cuEventQuery", 1, 700)

    with pytest.raises(VmmDriverError) as caught:
        driver.done(ticket)

    assert (caught.value.call, caught.value.code) == ("cuEventQuery", 700)
    assert driver.done(ticket)


def test_a_driver_with_work_going_on_does_not_close(fake: FakeCuda) -> None:
    """To unmap what a kernel reads would end the process's use of the device."""
    driver = make_cuda_driver()
    driver.record()
    fake.hold_events(1)

    with pytest.raises(VmmBusy, match="tickets"):
        driver.close()

    driver.close()


def test_work_that_failed_does_not_keep_a_driver_open(fake: FakeCuda) -> None:
    """Its fault was for whoever asked; its event goes with the driver."""
    driver = make_cuda_driver()
    driver.record()
    fake.fail("cuEventQuery", 1, 700)

    driver.close()

    assert not any(fake.live().values())


def test_a_dropped_driver_gives_everything_back(fake: FakeCuda) -> None:
    """Forgetting to close leaks nothing, and waits for work that may still go on."""
    driver = make_cuda_driver()
    Rig.build(driver)
    driver.record()
    before = fake.calls("cuCtxSynchronize")

    del driver
    gc.collect()

    assert not any(fake.live().values())
    assert fake.calls("cuCtxSynchronize") == before + 1


def test_any_thread_may_call_and_keeps_its_context(fake: FakeCuda, rig: Rig) -> None:
    """A thread without one gets the device's; one that has another device's keeps that."""
    call = CudaCalls()
    other = call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", 1))
    seen: list[tuple[bytes, int]] = []

    def work(context: Any) -> None:
        if context is not None:
            call("cuCtxSetCurrent", context)
        rig.driver.release(rig.driver.create(GRANULE))
        assert rig.driver.done(rig.driver.record())
        seen.append((rig.driver.copy_out(rig.base, 4), int(call("cuCtxGetCurrent"))))

    for context in (None, other):
        thread = threading.Thread(target=work, args=(context,))
        thread.start()
        thread.join()

    call("cuDevicePrimaryCtxRelease", call("cuDeviceGet", 1))
    assert seen == [(b"kept", 1), (b"kept", int(other))]


def test_each_device_has_its_own_access(fake: FakeCuda, rig: Rig) -> None:
    """A peer may read what is opened for it, until that is taken back; the owner stays open."""
    rig.driver.set_access([rig.span(0, 2)], Access.READ, devices=(1,))
    assert peer_can_read(rig.base)

    rig.driver.set_access([rig.span(0, 2)], Access.NONE, devices=(1,))

    assert not peer_can_read(rig.base)
    assert rig.driver.copy_out(rig.base, 4) == b"kept"
    rig.driver.set_access([rig.span(0, 2)], Access.NONE, devices=(0, 0))
    set_open(rig, rig.span(0, 2))


def test_access_of_every_device_is_rolled_back(fake: FakeCuda, rig: Rig) -> None:
    """The second span fails: the first is as it was, for both devices."""
    rig.driver.set_access([rig.span(0, 2)], Access.READ, devices=(1,))
    fake.fail("cuMemSetAccess", 2, 1)

    with pytest.raises(VmmDriverError):
        rig.driver.set_access([rig.span(0, 2), rig.span(2, 1)], Access.NONE, devices=(0, 1))

    assert peer_can_read(rig.base)
    rig.driver.copy_in(rig.base, b"kept")


def test_a_device_that_is_not_there_gets_no_access(fake: FakeCuda, rig: Rig) -> None:
    """Nor do those named beside it."""
    with pytest.raises(VmmDriverError):
        rig.driver.set_access([rig.span(0, 2)], Access.READ, devices=(1, 9))

    assert not peer_can_read(rig.base)


def test_torch_is_shown_the_memory_and_its_device(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a device, torch would copy to ordinary memory and say nothing."""
    shown: list[tuple[Any, str]] = []

    def as_tensor(data: object, device: str) -> torch.Tensor:
        shown.append((data, device))
        return torch.zeros(0, dtype=torch.uint8)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "as_tensor", as_tensor)
        rig.driver.tensor(rig.base, 2 * GRANULE, None)

    ((data, device),) = shown
    assert device == "cuda:0"
    assert data.__cuda_array_interface__ == {
        "shape": (2 * GRANULE,),
        "typestr": "|u1",
        "data": (rig.base, False),
        "version": 3,
    }


def test_a_tensor_that_torch_refuses_holds_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its addresses can be given back, whoever still looks at the error."""

    def refuse(data: object, device: str) -> torch.Tensor:
        raise RuntimeError(f"no {device} for {data}")

    va = rig.driver.reserve(GRANULE)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "as_tensor", refuse)
        with pytest.raises(RuntimeError) as caught:
            rig.driver.tensor(va, GRANULE, None)

    rig.driver.free_va(va, GRANULE)
    assert "cuda:0" in str(caught.value)


def test_what_is_booked_is_not_called_measured(rig: Rig) -> None:
    """The device's own count is of everybody's memory."""
    physical = rig.driver.physical()

    assert not physical.is_exact
    assert physical.measured_bytes == physical.booked_bytes
    assert physical.source.startswith("booked")


def test_without_bindings_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a typed error, when a driver is made and not when its module is loaded."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)

    with pytest.raises(BackendUnavailable, match=r"kvfabric\[cuda\]"):
        CudaVmmDriver(0, capacity_bytes=GRANULE)


def test_without_a_driver_the_extra_is_named() -> None:
    """In a process of its own, whose bindings find no library."""
    script = """
import ctypes, sys
try:
    ctypes.CDLL("libcuda.so.1")
    sys.exit("has one")
except OSError:
    pass
from actors.arena.driver_cuda import CudaVmmDriver
CudaVmmDriver(0, capacity_bytes=1 << 21)
"""
    done = run_script(script)
    if done.stderr.strip() == "has one":
        pytest.skip("this machine has an NVIDIA driver")

    assert "BackendUnavailable" in done.stderr
    assert "kvfabric[cuda]" in done.stderr.splitlines()[-1]
    assert "NVIDIA driver" in done.stderr.splitlines()[-1]


def test_no_device_means_unavailable(fake: FakeCuda) -> None:
    """A driver without a device answers its own code."""
    fake.fail("cuInit", 1, 100)

    with pytest.raises(BackendUnavailable, match="CUDA device"):
        CudaVmmDriver(0, capacity_bytes=GRANULE)


def test_a_forked_child_cannot_touch_its_parents_memory(fake: FakeCuda) -> None:
    """Every verb refuses there before CUDA is asked, and its finaliser gives nothing back."""
    script = f"""
import gc, os
from pathlib import Path
from tests.fakes.cuda_fake import bind
fake = bind(Path({str(fake.path)!r}))
from actors.arena.driver import *
from actors.arena.driver_cuda import CudaVmmDriver
from codec.errors import VmmForked

fake.size(65536)
driver = CudaVmmDriver(0, capacity_bytes=8 * 65536)
va = driver.reserve(65536)
handle = driver.create(65536)
driver.map(va, handle)
driver.set_access([Span(va, 65536)], Access.READ_WRITE)
driver.copy_in(va, b"the parent's")
ticket, share = driver.record(), driver.export(handle)
verbs = {{
    "caps": (), "reserve": (65536,), "free_va": (va, 65536), "create": (65536,),
    "release": (handle,), "map": (va, handle), "unmap": (va,), "set_access": ([], Access.NONE),
    "record": (), "done": (ticket,), "wait": (ticket, 0.0), "tensor": (va, 1, None),
    "copy_in": (va, b"x"), "copy_out": (va, 1), "physical": (), "stats": (), "close": (),
    "export": (handle,), "import_": (share,),
}}
names = ("cuMemUnmap", "cuMemRelease", "cuMemAddressFree", "cuCtxGetCurrent")
child = os.fork()
if child == 0:
    before = [fake.calls(name) for name in names]
    refused = 0
    for name, args in verbs.items():
        try:
            getattr(driver, name)(*args)
        except VmmForked:
            refused += 1
    del driver
    gc.collect()
    asked = before != [fake.calls(name) for name in names]
    os._exit(1 if asked or refused != len(verbs) else 0)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert driver.copy_out(va, 12) == b"the parent's"
driver.close()
assert not any(fake.live().values()), fake.live()
print("intact")
"""
    done = run_script(script)

    assert done.stdout == "intact\n", done.stderr


def peer_can_read(va: int) -> bool:
    """Whether device 1 can read the byte at ``va``."""
    call = CudaCalls()
    device = call("cuDeviceGet", 1)
    context = call("cuDevicePrimaryCtxRetain", device)
    target = bytearray(1)
    try:
        with call.current(context):
            return call.ask("cuMemcpyDtoH", target, va, 1) == 0
    finally:
        call("cuDevicePrimaryCtxRelease", device)


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    """``script`` run in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
