"""`CudaVmmDriver` on a device: the contract, the model, and tensors of torch's.

A process that has bound the stand-in for ``libcuda`` reaches no device: run
``pytest tests/gpu``.
"""

from __future__ import annotations

import pytest
import torch

from actors.arena.driver import Access, Span
from actors.arena.driver_cuda import CudaVmmDriver
from tests.gpu.devices import has_library, make_driver, why_no_device
from tests.suites.driver_contract import CAPACITY_GRANULES, Rig
from tests.suites.driver_machine import DriverMachine
from tests.suites.driver_suite import DriverSuite, TensorSuite
from tests.suites.quiet import QUIET_STATEFUL

pytestmark = pytest.mark.gpu
if not has_library():
    # In one line for all of them.
    pytest.skip("no NVIDIA driver here: nothing was tested on a device", allow_module_level=True)


@pytest.fixture(autouse=True)
def need_a_device() -> None:
    """Skip where there is none, and say why."""
    if why := why_no_device():
        pytest.skip(why)


class TestGpuDriver(DriverSuite):
    """The contract."""

    def make_driver(self, capacity_granules: int) -> CudaVmmDriver:
        """See `devices.make_driver`."""
        return make_driver(capacity_granules)


class TestGpuTensors(TensorSuite):
    """Tensors, where torch is built for the device."""

    @pytest.fixture(autouse=True)
    def need_torch_for_it(self) -> None:
        """Skip where torch is built for processors only."""
        if not torch.cuda.is_available():
            pytest.skip(f"torch {torch.__version__} is not built for CUDA devices")

    def make_driver(self, capacity_granules: int) -> CudaVmmDriver:
        """See `devices.make_driver`."""
        return make_driver(capacity_granules)


class GpuMachine(DriverMachine):
    """The model."""

    def make_driver(self, capacity_granules: int) -> CudaVmmDriver:
        """See `devices.make_driver`."""
        if why := why_no_device():
            pytest.skip(why)
        return make_driver(capacity_granules)


TestGpuMachine = GpuMachine.TestCase
TestGpuMachine.settings = QUIET_STATEFUL


def test_a_kernel_sees_what_is_copied_in_and_its_ticket_ends() -> None:
    """Work of torch's on the memory, recorded on its own stream, and waited for."""
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} is not built for CUDA devices")
    driver = make_driver(CAPACITY_GRANULES)
    rig = Rig.build(driver)
    tensor = driver.tensor(rig.base, 4, None)
    stream = torch.cuda.Stream()

    with torch.cuda.stream(stream):
        tensor += 1
    ticket = driver.record(stream=stream.cuda_stream)

    assert driver.wait(ticket, timeout_s=60)
    assert driver.copy_out(rig.base, 4) == b"lfqu"
    del tensor
    rig.undo()
    driver.close()


def test_a_mapping_for_reading_can_be_had() -> None:
    """Devices may know no access for reading only: this is where it would show."""
    driver = make_driver(1)
    granule = driver.caps().granule_min_bytes
    va, handle = driver.reserve(granule), driver.create(granule)
    driver.map(va, handle)

    driver.set_access([Span(va, granule)], Access.READ)

    assert driver.copy_out(va, 4) == bytes(4)
    driver.close()
