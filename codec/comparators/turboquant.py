"""TurboQuant's quantizer for squared error: rotate each head's vector, then round its coordinates.

1. The vector's norm is kept in 16 bits; what follows is its direction, a unit vector.
2. A fixed random rotation, the same for every token, layer and head.  Any direction becomes
   a uniformly random one, so each coordinate is spread alike: density proportional to
   ``(1 - t^2) ^ ((D - 3) / 2)``, close to a normal one of variance ``1 / D``.
3. Each coordinate is rounded to the nearest level of the Lloyd-Max quantizer of that
   density, ``b`` bits.  No scale, no zero point, no calibration.

With ``N`` elements of a kind in ``V`` head vectors: ``ceil(N b / 8) + 2 V`` bytes.

Left out: the variant for inner products (a bit of sign sketch in place of one of the
``b``), and a wider code for outlier channels, with which the paper makes 2.5 and 3.5 bits.

Source: arXiv 2504.19874, algorithm 1.  The norm is bfloat16 here, not float16: it adds
under a millionth of the energy to the error and holds whatever the cache can.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from codec.comparators.wire import Reader, pack_codes, tensor_bytes, to_bfloat16

_GRID = 1 << 15
_REACH = 9.0
"""Standard deviations past which a coordinate's density is nothing in 64 bits."""
_MAX_SWEEPS = 5000


@dataclass(frozen=True, slots=True)
class Codebook:
    """The scalar quantizer of one coordinate of a random unit vector."""

    levels: tuple[float, ...]
    """Rising; what a code stands for."""

    borders: tuple[float, ...]
    """One fewer: halfway between levels."""

    distortion: float
    """Expected squared error of the whole unit vector."""


@lru_cache(maxsize=64)
def lloyd_max(head_dim: int, bits: int) -> Codebook:
    """The quantizer of least squared error, by Lloyd's iteration on the density.

    The density is log-concave, so the iteration has one fixed point, and it is the best.

    Parameters
    ----------
    head_dim
        Dimensions of the vector; large ones give the normal density's quantizer.
    bits
        The quantizer has ``2 ** bits`` levels.

    Raises
    ------
    ValueError
        If the density is not bounded (``head_dim`` below 3), or bits are not in 1..8.
    """
    if head_dim < 3 or not 1 <= bits <= 8:
        raise ValueError(f"need heads of 3 or wider and 1..8 bits, got {head_dim}, {bits}")
    # In units of the standard deviation, 1 / sqrt(head_dim).
    reach = min(_REACH, math.sqrt(head_dim))
    edges = np.linspace(-reach, reach, _GRID + 1)
    points = (edges[1:] + edges[:-1]) / 2
    density = np.exp((head_dim - 3) / 2 * np.log1p(-(points**2) / head_dim))
    density /= density.sum()
    mass, moment = (
        np.concatenate([[0.0], np.cumsum(weights)]) for weights in (density, density * points)
    )
    num_levels = 1 << bits
    # The spacing that is best for many levels is where to start for few.
    spread = np.concatenate([[0.0], np.cumsum(np.cbrt(density))])
    borders = np.interp(np.arange(1, num_levels) / num_levels * spread[-1], spread, edges)
    levels = np.zeros(num_levels)
    for _ in range(_MAX_SWEEPS):
        cuts = np.concatenate([[-reach], borders, [reach]])
        old = levels
        levels = np.diff(np.interp(cuts, edges, moment)) / np.diff(np.interp(cuts, edges, mass))
        borders = (levels[1:] + levels[:-1]) / 2
        if np.abs(levels - old).max() < 1e-9:
            break
    nearest = levels[np.searchsorted(borders, points)]
    sigma = 1 / math.sqrt(head_dim)
    return Codebook(
        levels=tuple((levels * sigma).tolist()),
        borders=tuple((borders * sigma).tolist()),
        distortion=float((density * (points - nearest) ** 2).sum()),
    )


@lru_cache(maxsize=16)
def rotation(head_dim: int, seed: int) -> Tensor:
    """A rotation drawn evenly from all (reflections too): shape ``(D, D)``, float32.

    The orthogonal factor of a matrix of independent normal values, its signs fixed by a
    positive diagonal of the triangular one.
    """
    draw = torch.Generator().manual_seed(seed)
    normal = torch.randn(head_dim, head_dim, generator=draw, dtype=torch.float64)
    orthogonal, triangular = torch.linalg.qr(normal)
    turned: Tensor = orthogonal * triangular.diagonal().sign()
    return turned.float()


@dataclass(frozen=True, slots=True)
class RotationCoder:
    """Codes head vectors as a norm and ``bits`` per rotated coordinate."""

    bits: int
    seed: int = 0

    def encode(self, array_TLHD: Tensor) -> bytes:
        """The codes, then the norms."""
        head_dim = array_TLHD.shape[-1]
        book = lloyd_max(head_dim, self.bits)
        norms = torch.linalg.vector_norm(array_TLHD, dim=-1, keepdim=True, dtype=torch.float64)
        units = (array_TLHD / norms.where(norms > 0, 1.0)).float()
        rotated = units @ rotation(head_dim, self.seed).T
        codes = torch.bucketize(rotated, torch.tensor(book.borders), out_int32=True)
        return pack_codes(codes.to(torch.uint8), self.bits) + tensor_bytes(to_bfloat16(norms))

    def decode(self, data: bytes, shape: tuple[int, ...]) -> Tensor:
        """See `codec.comparators.arm.ArrayCoder.decode`."""
        reader = Reader(data)
        codes = reader.codes(shape, self.bits)
        norms = reader.elements((*shape[:-1], 1), torch.bfloat16).float()
        reader.close()
        levels = torch.tensor(lloyd_max(shape[-1], self.bits).levels)
        return levels[codes.int()] @ rotation(shape[-1], self.seed) * norms
