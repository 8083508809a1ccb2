"""`Driver` over the memory of a CUDA device, by the driver's own calls.

Each verb is one call of the driver, except that ``create`` also zeroes.  Tickets are
events.  Not confirmed on a device yet: tests run it over a stand-in for ``libcuda``.

It does not wait for work in flight, but for what nobody recorded when it is closed or
dropped.
"""

from __future__ import annotations

from actors.arena.driver_booked import BookedDriver
from actors.arena.system_cuda import CudaSystem


class CudaVmmDriver(BookedDriver):
    """Commits memory of one device under reserved addresses that all devices share.

    Parameters
    ----------
    device
        Its number, as CUDA counts in this process.
    capacity_bytes
        Budget: most bytes committed at once.  A multiple of the device's granule.
    gpu_direct_rdma
        Commit memory that network cards may be registered with.

    Raises
    ------
    BackendUnavailable
        If the bindings, the NVIDIA driver or the device are missing.
    """

    def __init__(
        self, device: int = 0, *, capacity_bytes: int, gpu_direct_rdma: bool = False
    ) -> None:
        super().__init__(CudaSystem(device, capacity_bytes, gpu_direct_rdma=gpu_direct_rdma))
