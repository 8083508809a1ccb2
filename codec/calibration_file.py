"""The file of a calibration: tensors and canonical JSON, under a digest of both.

It is safetensors; its metadata has the JSON text and the digest.  A file whose content
does not give the digest it states is refused.
"""

from __future__ import annotations

import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor

from codec.errors import CorruptBlobError
from codec.identity import Digest, digest

FORMAT = "kvfabric.calibration.1"


@dataclass(frozen=True, kw_only=True)
class CalibrationFile:
    """Content of a calibration's file; equal content has an equal digest."""

    metadata: str
    """Canonical JSON."""

    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> CalibrationFile:
        """Content with ``fields`` as its metadata."""
        stated = {"format": FORMAT, **fields}
        text = json.dumps(stated, sort_keys=True, separators=(",", ":"))
        return cls(metadata=text, tensors=tensors)

    @property
    def fields(self) -> dict[str, Any]:
        """The metadata, read."""
        fields = json.loads(self.metadata)
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise ValueError(f"need {FORMAT}")
        return fields

    @cached_property
    def digest(self) -> Digest:
        """Digest of the metadata and of every tensor's bytes."""
        parts = [self.metadata.encode()]
        for name, tensor in sorted(self.tensors.items()):
            shape = struct.pack(f"<{tensor.ndim}Q", *tensor.shape)
            parts += [name.encode(), str(tensor.dtype).encode(), shape]
            # A clone has plain strides, which an empty tensor need not have, and then no such view.
            plain = tensor.clone(memory_format=torch.contiguous_format)
            parts.append(plain.view(torch.uint8).numpy().tobytes())
        return digest(FORMAT, *parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def to_bytes(self) -> bytes:
        """The file itself."""
        stated = {"calibration": self.metadata, "digest": self.digest.hex()}
        return save_tensors(dict(self.tensors), metadata=stated)

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{self.digest.hex()}.part")
        part.write_bytes(self.to_bytes())
        part.replace(path)


class Filed(ABC):
    """A calibration of any profile: named by, and kept as, its file."""

    @property
    @abstractmethod
    def file(self) -> CalibrationFile:
        """All of it."""

    @classmethod
    @abstractmethod
    def from_parts(cls, stated: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """The calibration of these fields; a ``KeyError``, `TypeError` or `ValueError` if none."""

    @property
    def digest(self) -> Digest:
        """Names this calibration; equal content has an equal digest."""
        return self.file.digest

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters: the fixed cost that no ratio of blobs shows."""
        return self.file.nbytes

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        self.file.save(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that `save` wrote.

        Raises
        ------
        CorruptBlobError
            If the file is not one, is damaged, or does not give its stated digest.
        """
        return cls.from_file(read_file(path))

    @classmethod
    def from_file(cls, content: CalibrationFile) -> Self:
        """The calibration that a file holds.

        Raises
        ------
        CorruptBlobError
            If its fields are not those of this profile.
        """
        try:
            return cls.from_parts(content.fields, content.tensors)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptBlobError("calibration", f"cannot be read: {error}") from error


def read_file(path: Path) -> CalibrationFile:
    """Read what `CalibrationFile.save` wrote.

    Raises
    ------
    CorruptBlobError
        If the file is not one, is damaged, or does not give its stated digest.
    """
    where = f"calibration {path.name}"
    try:
        with safe_open(path, framework="pt") as file:
            stated = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        content = CalibrationFile(metadata=stated["calibration"], tensors=tensors)
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise CorruptBlobError(where, f"cannot be read: {error}") from error
    if content.digest.hex() != stated.get("digest"):
        raise CorruptBlobError(where, "content does not give the digest it states")
    return content
