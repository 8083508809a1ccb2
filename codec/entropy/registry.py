"""Byte coders by the names that blobs have for them.

A name is a byte format.  What reads it is always a coder of `CODERS`, which needs no
device; a codec that runs next to a GPU may have the same format written there, by the
coder of the same name that `device_coder_named` makes.  Which format a profile uses is the
profile's to say, and part of its codec's identity: `deflate` for ``paper``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from codec.entropy.coder import ByteCoder
from codec.entropy.deflate import DeflateCoder
from codec.entropy.nvcomp import NvcompCoder
from codec.entropy.stored import StoredCoder
from codec.entropy.zstd import ZstdCoder
from codec.errors import CorruptBlobError

CODERS: Mapping[str, Callable[[], ByteCoder]] = {
    "deflate": DeflateCoder,
    "stored": StoredCoder,
    "zstd": ZstdCoder,
}
DEVICE_CODERS: Mapping[str, Callable[[], ByteCoder]] = {
    name: partial(NvcompCoder, name) for name in ("deflate", "zstd")
}


def coder_named(name: str) -> ByteCoder:
    """A coder that decodes what any coder of that name encoded.

    Raises
    ------
    CorruptBlobError
        If no coder has that name: the bytes cannot be used here.
    BackendUnavailable
        If the one that has it needs a package that is not installed.
    """
    make = CODERS.get(name)
    if make is None:
        raise CorruptBlobError("entropy stage", f"need one of {', '.join(CODERS)}, got {name!r}")
    return make()


def device_coder_named(name: str) -> ByteCoder:
    """A coder of the same format that encodes on the current CUDA device.

    Raises
    ------
    ValueError
        If no device writes that format.
    BackendUnavailable
        Without the packages, a driver or a device.
    """
    make = DEVICE_CODERS.get(name)
    if make is None:
        raise ValueError(f"need one of {', '.join(DEVICE_CODERS)}, got {name!r}")
    return make()
