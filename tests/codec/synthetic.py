"""Small made-up caches with the structure that calibration looks for."""

from __future__ import annotations

import torch
from torch import Tensor

from codec.blob import BlobHeader
from codec.calibration import Calibration, CalibrationConfig, Calibrator
from codec.codec import TORCH_DTYPES
from codec.geometry import KVGeometry, Stage
from codec.identity import ChunkKey, CodecId, ComponentKey
from codec.rope import RotarySpec

GEOMETRY = KVGeometry(num_layers=3, num_kv_heads=2, key_head_dim=8, value_head_dim=6)
ROTARY = RotarySpec.uniform([1.0, 0.3, 0.1, 0.03], num_layers=3)
NAMESPACE = b"n" * 16


def cache(
    num_tokens: int, *, seed: int, start: int = 0, dtype: str = "float32"
) -> tuple[Tensor, Tensor]:
    """Rotated keys and values: a mean, few strong directions, weak noise.

    Directions are the same for every seed; only the rows differ.
    """
    mix = torch.Generator().manual_seed(7)
    draw = torch.Generator().manual_seed(seed)
    arrays = []
    for width, dim in ((GEOMETRY.key_width, 8), (GEOMETRY.value_width, 6)):
        loading = torch.randn(10, width, generator=mix) * torch.linspace(2, 0.3, 10)[:, None]
        mean = 3 * torch.randn(width, generator=mix)
        rows = torch.randn(num_tokens, 10, generator=draw) @ loading + mean
        rows += 0.02 * torch.randn(num_tokens, width, generator=draw)
        arrays.append(rows.view(num_tokens, 3, 2, dim))
    keys = ROTARY.rotate(arrays[0], torch.arange(start, start + num_tokens))
    return keys.to(TORCH_DTYPES[dtype]), arrays[1].to(TORCH_DTYPES[dtype])


def of_stage(array_TLHD: Tensor, stage: Stage) -> Tensor:
    """The share of an array that ``stage`` holds."""
    layers = slice(stage.layer_start, stage.layer_stop)
    return array_TLHD[:, layers, stage.head_start : stage.head_stop].contiguous()


def calibrated(
    *, stage: Stage = GEOMETRY.whole, target: float = 4.0, num_windows: int = 10, seed: int = 100
) -> Calibration:
    """A calibration fitted on `cache` windows of 48 tokens."""
    calibrator = Calibrator(
        stage,
        GEOMETRY.of_stage(stage),
        ROTARY.of_layers(range(stage.layer_start, stage.layer_stop)),
        CalibrationConfig(target=target, holdout_every=4, block_stride=1),
    )
    for window in range(num_windows):
        keys, values = cache(48, seed=seed + window)
        calibrator.add(of_stage(keys, stage), of_stage(values, stage))
    return calibrator.fit({"model": "synthetic", "tokens": 48 * num_windows})


def header(
    codec_id: CodecId,
    num_tokens: int,
    *,
    start: int = 0,
    dtype: str = "float32",
    stage: Stage = GEOMETRY.whole,
    namespace: bytes = NAMESPACE,
) -> BlobHeader:
    """A header for one component of `cache`."""
    return BlobHeader(
        namespace=namespace,
        codec=codec_id,
        component=ComponentKey(ChunkKey(b"c" * 16), stage),
        start_position=start,
        num_tokens=num_tokens,
        first_token=5,
        last_token=5,
        dtype=dtype,
        num_layers=stage.num_layers,
        num_heads=stage.num_heads,
        key_head_dim=GEOMETRY.key_head_dim,
        value_head_dim=GEOMETRY.value_head_dim,
    )
