"""`System` of a CUDA device's memory.

What is not obvious, and where it comes from:

* A handle is mapped as a whole, at offset 0 of it: the driver knows no other way.
* What the driver commits holds anything.  `CudaSystem.commit` zeroes it once, over
  addresses of its own and on a stream of its own, so that it waits for nobody's work
  but its own, and what is mapped first, for reading even, is zeros.
* Mappings end before their memory, and both before their addresses.
* Where undoing fails, it is tried again at the next verb that commits or gives back;
  memory leaks until then, and no address is given back with something mapped in it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from actors.arena.calls_cuda import CudaCalls
from actors.arena.driver import Access, Physical, Share, Span
from actors.arena.ledger import OWN_DEVICE, Block, Ledger, Loan, need_aligned
from actors.arena.system import Exposure
from codec.errors import (
    BackendUnavailable,
    VmmDriverError,
    VmmError,
    VmmNotShared,
    VmmOutOfMemory,
)


class CudaExposure(Exposure):
    """Memory as torch is shown it."""

    __slots__ = ()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.interface()


class CudaSystem:
    """Makes the calls of `CudaVmmDriver`, in the primary context of one device."""

    kind = "cuda"

    def __init__(self, device: int, capacity_bytes: int, *, gpu_direct_rdma: bool) -> None:
        self._call = call = CudaCalls()
        self._api = call.api
        self._device = device
        self.torch_device = f"cuda:{device}"
        self.capacity_bytes = capacity_bytes
        #: Sum of what was committed and not given back.
        self._booked_bytes = 0
        #: ``{ticket: event}`` of work that was not done when last asked for.
        self._events: dict[int, Any] = {}
        #: Calls that undo something and were refused, in the order they must be made.
        self._debts: deque[tuple[str, tuple[object, ...]]] = deque()
        try:
            self._cu_device = call("cuDeviceGet", device)
        except VmmDriverError as error:
            raise BackendUnavailable(f"CUDA device {device}", str(error)) from error
        with ExitStack() as undo:
            # The primary context, since torch's tensors live there.
            self._context = call("cuDevicePrimaryCtxRetain", self._cu_device)
            undo.callback(self._quietly, "cuDevicePrimaryCtxRelease", self._cu_device)
            with call.current(self._context):
                flags = self._api.CUstream_flags.CU_STREAM_NON_BLOCKING
                self._stream = call("cuStreamCreate", int(flags))
                undo.callback(self._quietly, "cuStreamDestroy", self._stream)
            self._choose_exports(gpu_direct_rdma)
            need_aligned("capacity_bytes", capacity_bytes, self.granule_bytes)
            undo.pop_all()

    def reserve(self, nbytes: int, align_bytes: int) -> int:
        """See `System.reserve`."""
        self._pay()
        try:
            return int(self._call("cuMemAddressReserve", nbytes, align_bytes, 0, 0))
        except VmmDriverError as error:
            raise self._lack("address space limit of the device", nbytes, error) from error

    def free(self, va: int, nbytes: int) -> None:
        """See `System.free`."""
        self._call("cuMemAddressFree", va, nbytes)

    def commit(self, nbytes: int) -> int:
        """See `System.commit`."""
        self._pay()
        free_bytes = self.capacity_bytes - self._booked_bytes
        if nbytes > free_bytes:
            raise VmmOutOfMemory("driver budget", nbytes, free_bytes)
        try:
            with ExitStack() as undo:
                backing = int(self._call("cuMemCreate", nbytes, self._prop, 0))
                undo.callback(self._undo, "cuMemRelease", backing)
                self._zero(backing, nbytes)
                undo.pop_all()
        except VmmDriverError as error:
            raise self._lack("memory limit of the device", nbytes, error) from error
        self._booked_bytes += nbytes
        return backing

    def give(self, block: Block) -> None:
        """See `System.give`.

        The driver keeps memory that another process has imported until that one ends
        its use of it, and does not say so: what is booked falls first.
        """
        self._pay()
        self._call("cuMemRelease", block.backing)
        if block.loan is None:
            self._booked_bytes -= block.nbytes

    def map(self, va: int, block: Block) -> None:
        """See `System.map`."""
        try:
            self._call("cuMemMap", va, block.nbytes, 0, block.backing, 0)
        except VmmDriverError as error:
            raise self._lack("mapping limit of the device", block.nbytes, error) from error

    def unmap(self, va: int, nbytes: int) -> None:
        """See `System.unmap`."""
        self._call("cuMemUnmap", va, nbytes)

    def targets(self, devices: Sequence[int]) -> tuple[int, ...]:
        """See `System.targets`."""
        named = tuple(OWN_DEVICE if device == self._device else device for device in devices)
        return tuple(dict.fromkeys(named)) or (OWN_DEVICE,)

    def protect(self, span: Span, access: Access, devices: Sequence[int]) -> None:
        """See `System.protect`."""
        grants = [self._grant(access, device) for device in devices]
        try:
            self._call("cuMemSetAccess", *span, grants, len(grants))
        except VmmDriverError as error:
            raise self._lack("mapping limit of the device", span.nbytes, error) from error

    def protect_back(self, span: Span, access: Access, device: int) -> None:
        """See `System.protect_back`."""
        self.protect(span, access, [device])

    def record(self, serial: int, stream: int | None) -> None:
        """See `System.record`.

        Without a stream, the legacy default one is meant, which waits for all streams
        that are not made to ignore it.  torch's own are: name them.
        """
        legacy = int(self._api.CU_STREAM_LEGACY)
        with self._call.current(self._context), ExitStack() as undo:
            flags = self._api.CUevent_flags.CU_EVENT_DISABLE_TIMING
            event = self._call("cuEventCreate", int(flags))
            undo.callback(self._undo, "cuEventDestroy", event)
            self._call("cuEventRecord", event, legacy if stream is None else stream)
            undo.pop_all()
        self._events[serial] = event

    def is_done(self, serial: int) -> bool:
        """See `System.is_done`."""
        code = self._call.ask("cuEventQuery", self._events[serial])
        if code == self._api.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if code != self._api.CUresult.CUDA_SUCCESS:
            raise VmmDriverError("cuEventQuery", code)
        self._undo("cuEventDestroy", self._events.pop(serial))
        return True

    def expose(self, va: int, nbytes: int, keeps: object) -> CudaExposure:
        """See `System.expose`."""
        return CudaExposure(va, nbytes, keeps)

    def tensor(self, exposure: Exposure) -> torch.Tensor:
        """See `System.tensor`."""
        # Without a device, torch would copy it to ordinary memory.
        return torch.as_tensor(exposure, device=self.torch_device)

    def write(self, va: int, source: npt.NDArray[np.uint8]) -> None:
        """See `System.write`."""
        with self._call.current(self._context):
            self._call("cuMemcpyHtoD", va, source.ctypes.data, source.size)
            # The call returns once the bytes are staged, which may be before they are there.
            self._call("cuStreamSynchronize", int(self._api.CU_STREAM_LEGACY))

    def read(self, va: int, nbytes: int) -> bytes:
        """See `System.read`."""
        target = np.empty(nbytes, np.uint8)
        with self._call.current(self._context):
            self._call("cuMemcpyDtoH", target.ctypes.data, va, nbytes)
        return target.tobytes()

    def share(
        self,
        block: Block,
        *,
        is_writable: bool,  # noqa: ARG002 - the driver has no descriptors for reading only
    ) -> tuple[int, int]:
        """See `System.share`."""
        if not self.exports:
            raise VmmNotShared(f"memory of {self.torch_device}", "this system has no way to")
        fd = int(self._call("cuMemExportToShareableHandle", block.backing, self._fd_type, 0))
        os.set_inheritable(fd, False)
        return fd, 0

    def borrow(self, share: Share) -> tuple[int, Loan]:
        """See `System.borrow`.

        The size of what comes cannot be asked for, so it is mapped once for a trial.
        """
        self._pay()
        try:
            with ExitStack() as undo:
                if share.offset_bytes:
                    raise VmmNotShared(share.identity, "memory of a device begins at 0")
                # Imported handles are as much ours to end as those that we made.
                name = "cuMemImportFromShareableHandle"
                backing = int(self._call(name, share.fd, self._fd_type))
                undo.callback(self._undo, "cuMemRelease", backing)
                with self._scratch(backing, share.nbytes):
                    undo.pop_all()
        except VmmDriverError as error:
            raise VmmNotShared(share.identity, f"the driver refuses it ({error})") from error
        return backing, Loan(-1, share.is_writable)

    def physical(self) -> Physical:
        """See `System.physical`."""
        return Physical(
            booked_bytes=self._booked_bytes,
            measured_bytes=self._booked_bytes,
            source="booked; the driver counts whole devices only",
            is_exact=False,
        )

    def check(self) -> None:
        """See `System.check`."""
        assert 0 <= self._booked_bytes <= self.capacity_bytes
        assert not self._debts

    def dispose(self, book: Ledger) -> None:
        """See `System.dispose`."""
        with suppress(VmmDriverError), self._call.current(self._context):
            # Work that nobody recorded may still touch what goes now.
            self._call("cuCtxSynchronize")
        for name, args in self._debts:
            self._quietly(name, *args)
        for mapping in book.mapped:
            self._quietly("cuMemUnmap", mapping.va, mapping.block.nbytes)
        for block in book.held:
            self._quietly("cuMemRelease", block.backing)
        for reservation in book.reservations:
            self._quietly("cuMemAddressFree", *reservation)
        for event in self._events.values():
            self._quietly("cuEventDestroy", event)
        self._quietly("cuStreamDestroy", self._stream)
        self._quietly("cuDevicePrimaryCtxRelease", self._cu_device)

    def _choose_exports(self, gpu_direct_rdma: bool) -> None:
        """Find out whether memory can be shared, and its granules, by committing one.

        That can only be said when memory is committed.  Only its being unsupported or
        not permitted means to do without; anything else is an error.
        """
        codes = self._api.CUresult
        types = self._api.CUmemAllocationHandleType
        self._fd_type = types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._prop = self._make_prop(self._fd_type, gpu_direct_rdma)
        self.exports = frozenset({"fd"})
        self._ask_granules()
        try:
            backing = self._call("cuMemCreate", self.granule_bytes, self._prop, 0)
        except VmmDriverError as error:
            if error.code not in {
                codes.CUDA_ERROR_NOT_SUPPORTED,
                codes.CUDA_ERROR_NOT_PERMITTED,
            }:
                raise self._lack("memory limit of the device", self.granule_bytes, error) from error
            self._prop = self._make_prop(types.CU_MEM_HANDLE_TYPE_NONE, gpu_direct_rdma)
            self.exports = frozenset()
            self._ask_granules()
        else:
            self._undo("cuMemRelease", int(backing))

    def _ask_granules(self) -> None:
        kinds = self._api.CUmemAllocationGranularity_flags
        ask = "cuMemGetAllocationGranularity"
        least, best = (
            int(self._call(ask, self._prop, kind))
            for kind in (
                kinds.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
                kinds.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
            )
        )
        self.granule_bytes = least
        self.granule_recommended_bytes = best

    def _make_prop(self, handle_type: object, gpu_direct_rdma: bool) -> object:
        prop: Any = self._api.CUmemAllocationProp()
        prop.type = self._api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.requestedHandleTypes = handle_type
        prop.location = self._location(OWN_DEVICE)
        prop.allocFlags.gpuDirectRDMACapable = int(gpu_direct_rdma)
        return prop

    def _location(self, device: int) -> object:
        location: Any = self._api.CUmemLocation()
        location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = self._device if device == OWN_DEVICE else device
        return location

    def _grant(self, access: Access, device: int) -> object:
        flags = self._api.CUmemAccess_flags
        grant: Any = self._api.CUmemAccessDesc()
        grant.location = self._location(device)
        grant.flags = {
            Access.NONE: flags.CU_MEM_ACCESS_FLAGS_PROT_NONE,
            Access.READ: flags.CU_MEM_ACCESS_FLAGS_PROT_READ,
            Access.READ_WRITE: flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        }[access]
        return grant

    def _zero(self, backing: int, nbytes: int) -> None:
        with self._call.current(self._context), self._scratch(backing, nbytes) as va:
            self.protect(Span(va, nbytes), Access.READ_WRITE, [OWN_DEVICE])
            self._call("cuMemsetD8Async", va, 0, nbytes, self._stream)
            self._call("cuStreamSynchronize", self._stream)

    @contextmanager
    def _scratch(self, backing: int, nbytes: int) -> Iterator[int]:
        """Addresses of our own at which ``backing`` is mapped for a moment."""
        with ExitStack() as undo:
            va = int(self._call("cuMemAddressReserve", nbytes, 0, 0, 0))
            undo.callback(self._undo, "cuMemAddressFree", va, nbytes)
            self._call("cuMemMap", va, nbytes, 0, backing, 0)
            undo.callback(self._undo, "cuMemUnmap", va, nbytes)
            yield va

    def _undo(self, name: str, *args: object) -> None:
        """Make a call that gives back; after one that was refused, each waits for it."""
        self._debts.append((name, args))
        self._pay()

    def _pay(self) -> None:
        """Make the calls that were refused before, as far as they are not again."""
        while self._debts:
            try:
                name, args = self._debts[0]
                self._call(name, *args)
            except VmmDriverError:
                return
            self._debts.popleft()

    def _quietly(self, name: str, *args: object) -> None:
        with suppress(VmmDriverError):
            self._call(name, *args)

    def _lack(self, limit: str, wanted_bytes: int, error: VmmDriverError) -> VmmError:
        """What to raise for a call that takes and was refused."""
        if error.code != self._api.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            return VmmDriverError(error.call, error.code)
        return VmmOutOfMemory(limit, wanted_bytes, self.capacity_bytes - self._booked_bytes)
