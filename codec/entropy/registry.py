"""Byte coders by the names that blobs have for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from codec.entropy.coder import ByteCoder
from codec.entropy.deflate import DeflateCoder
from codec.entropy.stored import StoredCoder
from codec.errors import CorruptBlobError

CODERS: Mapping[str, Callable[[], ByteCoder]] = {
    "deflate": DeflateCoder,
    "stored": StoredCoder,
}


def coder_named(name: str) -> ByteCoder:
    """A coder that decodes what any coder of that name encoded.

    Raises
    ------
    CorruptBlobError
        If no coder has that name: the bytes cannot be used here.
    """
    make = CODERS.get(name)
    if make is None:
        raise CorruptBlobError("entropy stage", f"need one of {', '.join(CODERS)}, got {name!r}")
    return make()
