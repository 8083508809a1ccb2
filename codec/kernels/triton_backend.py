"""Triton, or an error that names what to install.

Everything here that runs on a GPU imports Triton from this file.  The environment decides
at that moment whether kernels are compiled, or run by the interpreter on host arrays
(``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch

from codec.errors import BackendUnavailable

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise BackendUnavailable("triton", "install kvfabric[cuda] on a machine with a GPU") from error

__all__ = ["LAUNCH_OPTIONS", "launching_on", "tl", "triton"]

LAUNCH_OPTIONS: Final = {"enable_fp_fusion": True, "num_warps": 8}
"""For every launch.

No code depends on fusing, and Triton warns where it is not said.  With fewer warps, tiles
of these sizes spill more registers.
"""


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Within it, kernels go to ``device``, whichever is current: Triton does not look."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
