"""The stand-in for ``libcuda`` is as strict as it says: what it lets pass, no test sees."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from actors.arena.calls_cuda import CudaCalls
from tests.fakes.cuda_fake import DEVICE_NAME, FakeCuda, fake_cuda

GRANULE = 1 << 16
INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONTEXT, INVALID_HANDLE = 1, 2, 201, 400


@dataclass
class Bench:
    """A reservation of 8 granules with one granule of memory mapped at its start."""

    fake: FakeCuda
    call: CudaCalls
    va: int = 0
    handle: int = 0
    prop: Any = None
    taken: list[tuple[Any, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        api = self.call.api
        self.prop = api.CUmemAllocationProp()
        self.prop.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self.prop.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        types = api.CUmemAllocationHandleType
        self.prop.requestedHandleTypes = types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self.va = int(self.call("cuMemAddressReserve", 8 * GRANULE, 0, 0, 0))
        self.handle = int(self.call("cuMemCreate", GRANULE, self.prop, 0))
        self.call("cuMemMap", self.va, GRANULE, 0, self.handle, 0)

    def grants(self, device: int = 0, flags: int = 3) -> list[Any]:
        """What `cuMemSetAccess` takes."""
        api = self.call.api
        desc = api.CUmemAccessDesc()
        desc.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        desc.location.id = device
        desc.flags = api.CUmemAccess_flags(flags)
        return [desc]

    def close(self) -> None:
        """Give back what there is in the order that is right."""
        self.call("cuMemUnmap", self.va, GRANULE)
        self.call("cuMemRelease", self.handle)
        self.call("cuMemAddressFree", self.va, 8 * GRANULE)


@pytest.fixture
def bench() -> Iterator[Bench]:
    """The stand-in, called directly."""
    fake = fake_cuda()
    fake.size(GRANULE, total_bytes=4 * GRANULE)
    bench = Bench(fake, CudaCalls())
    yield bench
    fake.heal()
    bench.close()
    assert not any(fake.live().values())


def test_its_name_is_no_devices() -> None:
    """No log of it can be taken for one of a device."""
    fake_cuda()
    call = CudaCalls()

    name = call("cuDeviceGetName", 64, call("cuDeviceGet", 0))

    assert name.split(b"\0")[0].decode() == DEVICE_NAME == "FAKE (memfd) no GPU"


REFUSALS: dict[str, tuple[int, str, Callable[[Bench], tuple[Any, ...]]]] = {
    "reserve part of a granule": (
        INVALID_VALUE,
        "cuMemAddressReserve",
        lambda _: (GRANULE + 1, 0, 0, 0),
    ),
    "align to no power": (
        INVALID_VALUE,
        "cuMemAddressReserve",
        lambda _: (GRANULE, 3 * GRANULE, 0, 0),
    ),
    "create part of a granule": (INVALID_VALUE, "cuMemCreate", lambda b: (GRANULE - 1, b.prop, 0)),
    "create over its memory": (OUT_OF_MEMORY, "cuMemCreate", lambda b: (4 * GRANULE, b.prop, 0)),
    "map over a mapping": (INVALID_VALUE, "cuMemMap", lambda b: (b.va, GRANULE, 0, b.handle, 0)),
    "map from within": (
        INVALID_VALUE,
        "cuMemMap",
        lambda b: (b.va + GRANULE, GRANULE, GRANULE, b.handle, 0),
    ),
    "map unaligned": (
        INVALID_VALUE,
        "cuMemMap",
        lambda b: (b.va + GRANULE + 1, GRANULE, 0, b.handle, 0),
    ),
    "map more than there is": (
        INVALID_VALUE,
        "cuMemMap",
        lambda b: (b.va + GRANULE, 2 * GRANULE, 0, b.handle, 0),
    ),
    "map outside": (
        INVALID_VALUE,
        "cuMemMap",
        lambda b: (b.va + 8 * GRANULE, GRANULE, 0, b.handle, 0),
    ),
    "map no handle": (INVALID_HANDLE, "cuMemMap", lambda b: (b.va + GRANULE, GRANULE, 0, 999, 0)),
    "unmap a part": (INVALID_VALUE, "cuMemUnmap", lambda b: (b.va, GRANULE // 2)),
    "unmap a hole": (INVALID_VALUE, "cuMemUnmap", lambda b: (b.va + GRANULE, GRANULE)),
    "unmap more": (INVALID_VALUE, "cuMemUnmap", lambda b: (b.va, 2 * GRANULE)),
    "open a hole": (
        INVALID_VALUE,
        "cuMemSetAccess",
        lambda b: (b.va, 2 * GRANULE, b.grants(), 1),
    ),
    "open a part": (
        INVALID_VALUE,
        "cuMemSetAccess",
        lambda b: (b.va, GRANULE // 2, b.grants(), 1),
    ),
    "open for nobody": (INVALID_VALUE, "cuMemSetAccess", lambda b: (b.va, GRANULE, [], 0)),
    "free what is mapped": (INVALID_VALUE, "cuMemAddressFree", lambda b: (b.va, 8 * GRANULE)),
    "free a part": (INVALID_VALUE, "cuMemAddressFree", lambda b: (b.va + GRANULE, 7 * GRANULE)),
    "release no handle": (INVALID_HANDLE, "cuMemRelease", lambda _: (999,)),
    "copy without a context": (INVALID_CONTEXT, "cuMemcpyHtoD", lambda b: (b.va, b"x", 1)),
    "record without a context": (INVALID_CONTEXT, "cuEventRecord", lambda _: (1, 0)),
    "ask no event": (INVALID_HANDLE, "cuEventQuery", lambda _: (999,)),
    "destroy no event": (INVALID_HANDLE, "cuEventDestroy", lambda _: (999,)),
    "destroy a stream of its own": (INVALID_HANDLE, "cuStreamDestroy", lambda _: (1,)),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_it_refuses(bench: Bench, name: str) -> None:
    """With the driver's code, and without a change."""
    code, function, args = REFUSALS[name]
    live = bench.fake.live()

    assert bench.call.ask(function, *args(bench)) == code

    assert bench.fake.live() == live


def test_a_handle_used_too_long_is_known_for_what_it_is(bench: Bench) -> None:
    """Numbers do not come back, and what is mapped stays mapped."""
    second = int(bench.call("cuMemCreate", GRANULE, bench.prop, 0))
    bench.call("cuMemMap", bench.va + GRANULE, GRANULE, 0, second, 0)
    bench.call("cuMemRelease", second)
    assert bench.fake.live()["bytes"] == 2 * GRANULE

    assert bench.call.ask("cuMemRelease", second) == INVALID_HANDLE
    assert bench.call.ask("cuMemMap", bench.va + 2 * GRANULE, GRANULE, 0, second, 0) == (
        INVALID_HANDLE
    )

    bench.call("cuMemUnmap", bench.va + GRANULE, GRANULE)
    assert bench.fake.live()["bytes"] == GRANULE


def test_only_what_is_open_can_be_copied(bench: Bench) -> None:
    """Access is of a device; memory starts as anything but zeros."""
    device = bench.call("cuDeviceGet", 0)
    context = bench.call("cuDevicePrimaryCtxRetain", device)
    target = bytearray(2)
    with bench.call.current(context):
        assert bench.call.ask("cuMemcpyDtoH", target, bench.va, 2) == INVALID_VALUE
        bench.call("cuMemSetAccess", bench.va, GRANULE, bench.grants(flags=1), 1)
        bench.call("cuMemcpyDtoH", target, bench.va, 2)
        assert bench.call.ask("cuMemcpyHtoD", bench.va, b"ab", 2) == INVALID_VALUE
        assert bench.call.ask("cuMemcpyDtoH", target, bench.va + GRANULE - 1, 2) == INVALID_VALUE
    bench.call("cuDevicePrimaryCtxRelease", device)

    assert target == b"\xa5\xa5"


def test_only_its_own_memory_can_be_imported(bench: Bench) -> None:
    """A descriptor of anything else is refused."""
    fd_type = bench.prop.requestedHandleTypes
    reader, writer = os.pipe()

    assert bench.call.ask("cuMemImportFromShareableHandle", reader, fd_type) == INVALID_VALUE

    os.close(reader)
    os.close(writer)
    fd = bench.call("cuMemExportToShareableHandle", bench.handle, fd_type, 0)
    again = int(bench.call("cuMemImportFromShareableHandle", fd, fd_type))
    os.close(fd)
    assert again != bench.handle
    assert bench.fake.live()["bytes"] == GRANULE
    bench.call("cuMemRelease", again)


def test_it_fails_the_call_that_it_is_told_to(bench: Bench) -> None:
    """That one, once, and it counts the call."""
    before = bench.fake.calls("cuDeviceGetCount")
    bench.fake.fail("cuDeviceGetCount", 2, 999)

    codes = [bench.call.ask("cuDeviceGetCount") for _ in range(3)]

    assert codes == [0, 999, 0]
    assert not bench.fake.has_fault
    assert bench.fake.calls("cuDeviceGetCount") == before + 3
