"""The CUDA driver's calls, with its answers as typed errors.

Nothing is kept between calls: there is no last error that could be read too late.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, SupportsInt

from codec.errors import BackendUnavailable, VmmDriverError

_WHAT = "the CUDA memory driver"
_EXTRA = "install kvfabric[cuda]"


class CudaCalls:
    """`cuda.bindings.driver`, ready to use; refuses to be where that is not to be had."""

    def __init__(self) -> None:
        try:
            # Not when this is loaded: the bindings are an extra.
            from cuda.bindings import (  # type: ignore[import-untyped,unused-ignore] # noqa: PLC0415
                driver,
            )
        except ImportError as error:
            raise BackendUnavailable(_WHAT, _EXTRA) from error
        self.api: Any = driver
        try:
            self("cuInit", 0)
        except RuntimeError as error:  # no libcuda, said by the bindings' own class
            raise BackendUnavailable(_WHAT, f"{_EXTRA} and an NVIDIA driver ({error})") from error
        except VmmDriverError as error:
            raise BackendUnavailable(_WHAT, f"{_EXTRA} and a CUDA device ({error})") from error

    def __call__(self, name: str, *args: object) -> Any:  # noqa: ANN401 - the bindings have no types
        """Call ``name`` and return its result, if it has one.

        Raises
        ------
        VmmDriverError
            If the driver answers anything but success.
        """
        code, *results = getattr(self.api, name)(*args)
        if code != self.api.CUresult.CUDA_SUCCESS:
            raise VmmDriverError(name, int(code))
        return results[0] if results else None

    def ask(self, name: str, *args: object) -> int:
        """The code that the driver answers, whatever it is."""
        return int(getattr(self.api, name)(*args)[0])

    @contextmanager
    def current(self, context: SupportsInt) -> Iterator[None]:
        """Work in ``context``, and leave the thread in the one that it had, if any.

        To set it for good where the thread has another would move what torch launches
        there next to another device.
        """
        before = int(self("cuCtxGetCurrent"))
        if before == int(context):
            yield
        elif not before:
            self("cuCtxSetCurrent", context)
            yield
        else:
            self("cuCtxPushCurrent", context)
            try:
                yield
            finally:
                self("cuCtxPopCurrent")
