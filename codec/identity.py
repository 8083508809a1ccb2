"""Digests that name things by content: the same on every node, process and Python.

Two questions are kept apart.  The *namespace* says what the KV is (weights, adapter,
geometry, positions, tenant); the *codec identity* says how it is stored (format,
calibration).  A chunk key depends on the first and never on the second.

Every digest is BLAKE2b-128 over a domain name and length-prefixed fields, so that no
two field lists share an encoding and no two kinds of digest collide.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, fields
from typing import NewType

from codec.geometry import Stage

Digest = NewType("Digest", bytes)
ChunkKey = NewType("ChunkKey", bytes)
"""Names the tokens of one chunk and everything before it, within a namespace."""
CodecId = NewType("CodecId", bytes)
"""Names a codec with its calibration: blobs of equal id decode alike."""

DIGEST_BYTES = 16
UNBOUNDED = "unbounded"
"""Retention class of full attention, the only class stored so far."""


def digest(domain: str, *parts: bytes) -> Digest:
    """BLAKE2b-128 of ``parts`` in ``domain``; injective over the list of parts.

    Examples
    --------
    >>> digest("demo", b"ab", b"c") == digest("demo", b"a", b"bc")
    False
    """
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in (domain.encode(), *parts):
        hasher.update(struct.pack("<Q", len(part)))
        hasher.update(part)
    return Digest(hasher.digest())


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """What a KV cache is: equal namespaces mean that KV of equal tokens is equal."""

    weights: str
    """Fingerprint of the model's weights and configuration, hex."""

    dtype: str
    """Data type the engine computes and caches in, such as ``bfloat16``."""

    geometry: str
    """Text form of the cache's geometry and rotary parameters."""

    adapter: str = ""
    """Adapter name and content revision; empty for the bare model."""

    tenant_salt: str = ""
    """Keeps tenants apart who must not share KV."""

    def digest(self) -> Digest:
        """The namespace's name; a field cannot be mistaken for its neighbour."""
        return digest(
            "kvfabric.namespace.1",
            *(f"{field.name}={getattr(self, field.name)}".encode() for field in fields(self)),
        )


@dataclass(frozen=True, slots=True)
class ComponentKey:
    """Names one chunk's bytes for one stage and retention class."""

    chunk_key: ChunkKey
    stage: Stage
    retention_class: str = UNBOUNDED

    def __str__(self) -> str:
        return f"{self.chunk_key.hex()}/{self.stage}/{self.retention_class}"
