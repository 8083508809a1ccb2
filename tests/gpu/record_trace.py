"""Record how a device answers the drivers' contract: ``python -m tests.gpu.record_trace``.

The file it writes is what the host's and the stand-in's traces are compared with.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime

from actors.arena.calls_cuda import CudaCalls
from tests.fakes.cuda_fake import DEVICE_NAME
from tests.gpu.devices import make_driver, why_no_device
from tests.suites.device_trace import TRACE_PATH
from tests.suites.driver_contract import CAPACITY_GRANULES, walk_contract


def record() -> dict[str, object]:
    """The trace, and what it is of."""
    if why := why_no_device():
        raise SystemExit(why)
    call = CudaCalls()
    name = call("cuDeviceGetName", 256, call("cuDeviceGet", 0)).split(b"\0")[0].decode()
    if name == DEVICE_NAME:
        raise SystemExit(f"{name} is no device")
    return {
        "device": name,
        "driver": int(call("cuDriverGetVersion")),
        "date": datetime.now(UTC).date().isoformat(),
        "trace": walk_contract(make_driver(CAPACITY_GRANULES)),
    }


if __name__ == "__main__":
    TRACE_PATH.write_text(json.dumps(record(), indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{TRACE_PATH}\n")
