"""`record_trace`: what it writes is of a device."""

from __future__ import annotations

import pytest

from tests.fakes.cuda_fake import fake_cuda
from tests.gpu import record_trace
from tests.gpu.devices import why_no_device


def test_the_stand_in_is_not_recorded() -> None:
    """A process that has bound it refuses, before anything is written."""
    fake_cuda()

    with pytest.raises(SystemExit, match="stand-in"):
        record_trace.record()


@pytest.mark.gpu
def test_a_device_is_recorded_by_its_name() -> None:
    """With the driver's version and the day."""
    if why := why_no_device():
        pytest.skip(why)

    recorded = record_trace.record()

    assert {"device", "driver", "date", "trace"} == recorded.keys()
