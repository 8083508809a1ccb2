"""Small made-up caches, gradients and calibrations for the entropy profile; built once each.

Rows have a spectrum that falls slowly, so that many coefficients are kept.  The planted
Fisher information has one block per layer and head, and a token's weight in it is a linear
form of its keys, which is what `codec.importance` looks for.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import torch
from torch import Tensor

from codec.basis import Moments
from codec.blob import BlobHeader
from codec.codec import TORCH_DTYPES
from codec.entropy_calibration import EntropyCalibration, EntropyConfig, EntropyKind
from codec.entropy_codec import EntropyCodec
from codec.entropy_fit import EntropyFitter
from codec.geometry import KVGeometry, Stage
from codec.identity import ChunkKey, CodecId, ComponentKey
from codec.importance import Importance
from codec.rope import RotarySpec
from codec.sensitivity import Metric, Sensitivity, SensitivityMeter

GEOMETRY = KVGeometry(num_layers=4, num_kv_heads=2, key_head_dim=16, value_head_dim=12)
ROTARY = RotarySpec.uniform([1.0, 0.5, 0.3, 0.1, 0.05, 0.03, 0.01, 0.003], num_layers=4)
NAMESPACE = b"n" * 16
NUM_BLOCKS = GEOMETRY.num_layers * GEOMETRY.num_kv_heads
DIMS = (GEOMETRY.key_head_dim, GEOMETRY.value_head_dim)
WIDTHS = (GEOMETRY.key_width, GEOMETRY.value_width)
#: Of a token's planted importance: standard deviation of its natural logarithm.
IMPORTANCE_SPREAD = 1.5


def plain_rows(num_tokens: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Unrotated keys and values, ``(T, W)``: directions are the same for every seed."""
    mix = torch.Generator().manual_seed(7)
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for width in WIDTHS:
        spread = torch.arange(1, width + 1) ** -0.8
        loading = torch.linalg.qr(torch.randn(width, width, generator=mix))[0] * 6
        mean = 2 * torch.randn(width, generator=mix)
        rows.append((torch.randn(num_tokens, width, generator=draw) * spread) @ loading.T + mean)
    return rows[0], rows[1]


def rotated(
    rows: tuple[Tensor, Tensor], *, start: int = 0, dtype: str = "float32"
) -> tuple[Tensor, Tensor]:
    """Plain rows as an engine holds them, ``(T, L, H, D)``."""
    keys, values = (
        part.view(-1, GEOMETRY.num_layers, GEOMETRY.num_kv_heads, dim)
        for part, dim in zip(rows, DIMS, strict=True)
    )
    keys = ROTARY.rotate(keys, torch.arange(start, start + len(keys)))
    return keys.to(TORCH_DTYPES[dtype]), values.to(TORCH_DTYPES[dtype])


def rotated_cache(
    num_tokens: int, *, seed: int, start: int = 0, dtype: str = "float32"
) -> tuple[Tensor, Tensor]:
    """Keys and values of made-up text, as an engine holds them."""
    return rotated(plain_rows(num_tokens, seed=seed), start=start, dtype=dtype)


@cache
def planted_blocks(kind: int) -> Tensor:
    """Blocks of Fisher information of keys (0) or values (1), ``(B, D, D)``."""
    draw = torch.Generator().manual_seed(20 + kind)
    dim = DIMS[kind]
    turn = torch.linalg.qr(torch.randn(NUM_BLOCKS, dim, dim, generator=draw))[0]
    variance = torch.logspace(0, -2, dim) * torch.logspace(0.5, -0.5, NUM_BLOCKS)[:, None]
    return turn @ torch.diag_embed(variance) @ turn.transpose(1, 2)


def planted_log_importance(keys_TW: Tensor) -> Tensor:
    """Natural logarithm of how much each token matters, around 0."""
    keys, _ = plain_rows(512, seed=99)
    direction = torch.linspace(-1, 1, GEOMETRY.key_width)
    form = (keys_TW - keys.mean(0)) @ direction
    return IMPORTANCE_SPREAD * form / ((keys - keys.mean(0)) @ direction).std()


def gradients(keys_TW: Tensor, *, seed: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Gradients whose second moments are the planted blocks times the token's importance."""
    draw = torch.Generator().manual_seed(seed)
    weight_T = (planted_log_importance(keys_TW) / 2).exp() * scale
    parts = []
    for kind, dim in enumerate(DIMS):
        root = torch.linalg.cholesky(planted_blocks(kind))
        noise = torch.randn(NUM_BLOCKS, len(keys_TW), dim, generator=draw)
        rows = (noise @ root.transpose(1, 2)).transpose(0, 1).reshape(len(keys_TW), -1)
        parts.append(rows * weight_T[:, None])
    return parts[0], parts[1]


@cache
def sensitivity(scale: float = 1.0) -> Sensitivity:
    """What a meter finds in four windows of planted gradients."""
    meter = SensitivityMeter(GEOMETRY)
    for window in range(4):
        keys, _ = plain_rows(256, seed=300 + window)
        meter.add(keys, *gradients(keys, seed=400 + window, scale=scale))
    return meter.result()


def plain_sensitivity(stage: Stage = GEOMETRY.whole) -> Sensitivity:
    """All coordinates matter alike, and all tokens."""
    shape = GEOMETRY.of_stage(stage)
    num_blocks = shape.num_layers * shape.num_kv_heads
    keys, _ = plain_rows(256, seed=300)
    return Sensitivity(
        key_metric=Metric.plain(num_blocks, shape.key_head_dim),
        value_metric=Metric.plain(num_blocks, shape.value_head_dim),
        keys_NW=share(keys, 0, stage).bfloat16(),
        importance_N=torch.ones(256),
    )


def share(rows_TW: Tensor, kind: int, stage: Stage) -> Tensor:
    """The part of plain rows that ``stage`` holds."""
    rows = rows_TW.view(-1, GEOMETRY.num_layers, GEOMETRY.num_kv_heads, DIMS[kind])
    layers = slice(stage.layer_start, stage.layer_stop)
    return rows[:, layers, stage.head_start : stage.head_stop].flatten(1).contiguous()


def fitter_of(measured: Sensitivity, *, stage: Stage = GEOMETRY.whole) -> EntropyFitter:
    """A fitter of 1,024 rows, and 1,024 held-out ones."""
    moments = []
    for kind, rows in enumerate(plain_rows(1024, seed=100)):
        part = Moments(share(rows, kind, stage).shape[1])
        part.add(share(rows, kind, stage))
        moments.append(part)
    held_out = plain_rows(1024, seed=200)
    return EntropyFitter(
        stage,
        GEOMETRY.of_stage(stage),
        ROTARY.of_layers(range(stage.layer_start, stage.layer_stop)),
        moments=(moments[0], moments[1]),
        held_out=(share(held_out[0], 0, stage), share(held_out[1], 1, stage)),
        sensitivity=measured,
        # The last group is shorter.
        layers_per_basis=3,
    )


@cache
def fitter() -> EntropyFitter:
    """The fitter of the planted sensitivity, whole model."""
    return fitter_of(sensitivity())


@cache
def calibrated(target: float = 8.0, time_price: float = 0.0) -> EntropyCalibration:
    """A calibration of the whole model."""
    config = EntropyConfig(target=target, time_price=time_price)
    return fitter().fit(config, {"model": "synthetic", "tokens": 1024})


@cache
def calibrated_stage(stage: Stage, target: float = 4.0) -> EntropyCalibration:
    """A calibration of one stage, with a plain metric."""
    made = fitter_of(plain_sensitivity(stage), stage=stage)
    return made.fit(EntropyConfig(target=target), {"model": "synthetic"})


@cache
def codec_of(target: float = 8.0) -> EntropyCodec:
    """A codec for the whole model; immutable, hence shared."""
    return EntropyCodec(calibrated(target))


def header(
    codec_id: CodecId,
    num_tokens: int,
    *,
    start: int = 0,
    dtype: str = "float32",
    stage: Stage = GEOMETRY.whole,
    namespace: bytes = NAMESPACE,
    geometry: KVGeometry = GEOMETRY,
) -> BlobHeader:
    """A header for one component."""
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
        key_head_dim=geometry.key_head_dim,
        value_head_dim=geometry.value_head_dim,
    )


def encoded(
    codec: EntropyCodec,
    cached: tuple[Tensor, Tensor],
    *,
    start: int = 0,
    stage: Stage = GEOMETRY.whole,
) -> bytes:
    """The blob of a cache, under a header of its own shape and dtype."""
    dtype = str(cached[0].dtype).removeprefix("torch.")
    described = header(codec.codec_id, len(cached[0]), start=start, dtype=dtype, stage=stage)
    return codec.encode(*cached, header=described)


def dense(kind: EntropyKind) -> tuple[Tensor, Tensor]:
    """Matrices of all groups in one: shapes ``(W, C)`` and ``(C, W)``."""
    forward_WC = torch.zeros(len(kind.mean_W), kind.rank)
    backward_CW = torch.zeros(kind.rank, len(kind.mean_W))
    for group in kind.groups:
        forward_WC[group.coordinates, group.columns_C] = group.forward_CG.T
        backward_CW[group.columns_C, group.coordinates] = group.backward_CG
    return forward_WC, backward_CW


def wide_calibration(num_layers: int, head_dim: int, rank: int) -> EntropyCalibration:
    """A calibration of realistic width made without rows: random directions, plain metric."""
    geometry = KVGeometry(
        num_layers=num_layers, num_kv_heads=1, key_head_dim=head_dim, value_head_dim=head_dim
    )
    draw = torch.Generator().manual_seed(3)
    base = calibrated()
    width = geometry.key_width
    levels = torch.linspace(34, 8, rank).to(torch.int32)
    kinds = [
        EntropyKind(
            mean_W=torch.randn(width, generator=draw),
            metric=Metric.plain(num_layers, head_dim),
            directions_GC=torch.linalg.qr(torch.randn(width, rank, generator=draw))[0].half(),
            group_C=torch.zeros(rank, dtype=torch.int32),
            level_C=levels,
            outside_energy=1.0,
        )
        for _ in range(2)
    ]
    return dataclasses.replace(
        base,
        stage=geometry.whole,
        geometry=geometry,
        rotary=RotarySpec.uniform([1.0] * (head_dim // 2), num_layers=num_layers),
        importance=Importance.none(width),
        max_token_error=1e6,
        keys=kinds[0],
        values=kinds[1],
    )
