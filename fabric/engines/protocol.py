"""What the fabric asks of an inference engine, whichever it is.

Token lists are always whole sequences, from position 0.  A cache that goes with one holds
KV of its first tokens, `Engine.cached_tokens` many, and only the rest is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from codec.geometry import KVGeometry
from codec.identity import Namespace
from codec.rope import RotarySpec

CacheT = TypeVar("CacheT")
"""An engine's own cache object, opaque to everyone else."""

OnToken = Callable[[int], None]
"""Told each token as soon as it is known; what it raises ends the generation."""


class Engine(Protocol[CacheT]):
    """A language model that can hand out the KV of a prefix and take it back.

    A method that is given a cache may extend it in place.  One that raises leaves the
    cache with the tokens it had.
    """

    @property
    def geometry(self) -> KVGeometry:
        """Shape of the whole model's cache."""
        ...

    @property
    def rotary(self) -> RotarySpec:
        """How its keys are rotated, layer by layer."""
        ...

    @property
    def window_tokens(self) -> int:
        """Last tokens of a prompt that are computed even where their KV is stored."""
        ...

    def namespace(self, tenant_salt: str = "") -> Namespace:
        """Name of the KV that this engine computes; equal names, equal KV."""
        ...

    def cached_tokens(self, cache: CacheT) -> int:
        """Tokens whose KV ``cache`` holds."""
        ...

    def prefill(
        self, tokens: Sequence[int], cache: CacheT | None = None
    ) -> tuple[CacheT, torch.Tensor]:
        """Compute KV of all of ``tokens``.

        Returns
        -------
        cache
            The one given, extended, or a new one.
        last_logits
            Shape ``(vocabulary,)``, ``float32``, on the CPU: what may follow the last token.

        Raises
        ------
        ValueError
            If the cache leaves no token to compute.
        """
        ...

    def capture(self, cache: CacheT, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy out the KV of positions ``[start, stop)``.

        Returns
        -------
        keys_TLHD, values_TLHD
            On the CPU, in the data type of the cache, keys rotated to their positions.

        Raises
        ------
        ValueError
            If the cache does not hold them all, in every layer.
        """
        ...

    def restore(self, keys_TLHD: torch.Tensor, values_TLHD: torch.Tensor) -> CacheT:
        """Make a new cache that holds positions ``[0, T)``; the tensors are copied.

        Raises
        ------
        ValueError
            If they do not have this engine's geometry and data type.
        """
        ...

    def generate(
        self,
        tokens: Sequence[int],
        cache: CacheT | None,
        max_new_tokens: int,
        *,
        on_token: OnToken | None = None,
    ) -> list[int]:
        """Continue ``tokens`` greedily and return the new ones only.

        Raises
        ------
        ValueError
            If the cache leaves no token to compute.
        """
        ...

    def score(
        self, tokens: Sequence[int], cache: CacheT | None, continuation: Sequence[int]
    ) -> torch.Tensor:
        """Logits that predict each token of ``continuation``, given all before it.

        The cache is left as it was.

        Returns
        -------
        logits
            Shape ``(len(continuation), vocabulary)``, ``float32``, on the CPU.

        Raises
        ------
        ValueError
            If the cache leaves no token of ``tokens`` to compute.
        """
        ...
