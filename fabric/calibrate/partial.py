"""What an interrupted calibration leaves behind: tensors in a file that checks itself.

Layout: a digest of all the rest, the length of a JSON table, the table, the tensors.  It is
written piece by piece, since the moments of a large model do not fit in memory twice.
"""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import xxhash
from torch import Tensor

_DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16)}
_DTYPES[str(torch.int64)] = torch.int64
_DIGEST_BYTES = 16
_READ_BYTES = 1 << 20
_MAX_TABLE_BYTES = 1 << 24

_log = logging.getLogger(__name__)


def save_partial(path: Path, key: str, tensors: Mapping[str, Tensor]) -> None:
    """Write ``tensors`` whole or not at all; a disk that is full costs a warning only.

    Parameters
    ----------
    key
        Says what the tensors belong to; only who asks for it gets them.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(part, key, tensors)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        _log.warning("an interrupted calibration could not go on from here: %s", error)


def load_partial(path: Path, key: str) -> dict[str, Tensor] | None:
    """What `save_partial` wrote under ``key``; nothing if it is absent, damaged or another's."""
    try:
        with path.open("rb") as file:
            stated = file.read(_DIGEST_BYTES)
            hasher = xxhash.xxh3_128()
            while piece := file.read(_READ_BYTES):
                hasher.update(piece)
            if hasher.digest() != stated:
                return None
            file.seek(_DIGEST_BYTES)
            (table_bytes,) = struct.unpack("<Q", file.read(8))
            if table_bytes > _MAX_TABLE_BYTES:
                return None
            table = json.loads(file.read(table_bytes))
            if table["key"] != key:
                return None
            return {
                name: _read_tensor(file.read(num_bytes), dtype, shape)
                for name, dtype, shape, num_bytes in table["tensors"]
            }
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None


def _write(path: Path, key: str, tensors: Mapping[str, Tensor]) -> None:
    hasher = xxhash.xxh3_128()
    with path.open("wb") as file:
        file.write(bytes(_DIGEST_BYTES))
        for piece in _pieces(key, tensors):
            hasher.update(piece)
            file.write(piece)
        file.seek(0)
        file.write(hasher.digest())
        file.flush()
        os.fsync(file.fileno())


def _pieces(key: str, tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    table = {
        "key": key,
        "tensors": [
            [name, str(tensor.dtype), list(tensor.shape), tensor.nbytes]
            for name, tensor in tensors.items()
        ],
    }
    text = json.dumps(table).encode()
    yield struct.pack("<Q", len(text))
    yield text
    for tensor in tensors.values():
        if tensor.numel():
            yield tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def _read_tensor(data: bytes, dtype: str, shape: list[int]) -> Tensor:
    if not data:
        return torch.zeros(shape, dtype=_DTYPES[dtype])
    return torch.frombuffer(bytearray(data), dtype=_DTYPES[dtype]).view(shape)
