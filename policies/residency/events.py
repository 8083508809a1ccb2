"""What a worker tells the world about the components it holds.

A worker's stream is named by (node, incarnation) and numbered by ``seq``, which rises
by one with every delta.  Whoever has applied every delta up to ``seq``, or a snapshot
taken at ``seq``, knows exactly what the worker held then.
"""

from __future__ import annotations

from dataclasses import dataclass

from codec.identity import CodecId, ComponentKey


@dataclass(frozen=True, slots=True)
class Placement:
    """One component in one place."""

    component: ComponentKey
    codec: CodecId
    node: str
    tier: str
    """``hbm``, ``host``, ``disk``."""

    stored_bytes: int
    """The whole blob: header, checksums, every section."""

    decoded_bytes: int
    """The same tokens in 16 bits: ``geometry.raw_bytes_per_token * num_tokens``."""

    num_tokens: int

    def __post_init__(self) -> None:
        for name in ("stored_bytes", "decoded_bytes", "num_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Delta:
    """One numbered change of what a worker holds; removals apply before additions."""

    node: str
    incarnation: int
    seq: int
    added: tuple[Placement, ...] = ()
    removed: tuple[tuple[ComponentKey, CodecId], ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a worker holds once every delta up to ``seq`` is applied."""

    node: str
    incarnation: int
    seq: int
    placements: tuple[Placement, ...] = ()
