"""One transform codec per layer: what a basis and budget shared by all layers are worth.

Each layer is a stage of its own, with its own basis of keys and of values and the
paper's allocation at the same target.  Stored are that many whole blobs, headers and
exact rows included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from codec.calibration import Calibration, CalibrationConfig, Calibrator
from codec.codec import TORCH_DTYPES
from codec.comparators.arm import Restored, checked
from codec.geometry import KVGeometry, Stage
from codec.header import BlobHeader
from codec.identity import DIGEST_BYTES, ChunkKey, ComponentKey
from codec.kvtc import KvtcCodec
from codec.rope import RotarySpec

_NOBODY = bytes(DIGEST_BYTES)
"""Namespace and chunk key of blobs that nobody will look up."""


class LayerCalibrators:
    """Takes captured rows of a whole model, window by window, and fits each layer alone."""

    def __init__(self, geometry: KVGeometry, rotary: RotarySpec, config: CalibrationConfig) -> None:
        #: One per layer, in order.
        self._calibrators = [
            Calibrator(
                stage, geometry.of_stage(stage), rotary.of_layers(range(layer, layer + 1)), config
            )
            for layer, stage in enumerate(geometry.split_layers(geometry.num_layers))
        ]

    def add(self, keys_TLHD: Tensor, values_TLHD: Tensor, *, start_position: int = 0) -> None:
        """Count one window of the whole cache; keys rotated, as the engine holds them."""
        for layer, calibrator in enumerate(self._calibrators):
            calibrator.add(
                keys_TLHD[:, layer : layer + 1],
                values_TLHD[:, layer : layer + 1],
                start_position=start_position,
            )

    def fit(self, provenance: Mapping[str, str | int]) -> tuple[Calibration, ...]:
        """One calibration per layer; see `codec.calibration.Calibrator.fit`."""
        return tuple(calibrator.fit(provenance) for calibrator in self._calibrators)


class LayeredArm:
    """Codes each layer with its own calibration."""

    def __init__(
        self,
        calibrations: Sequence[Calibration],
        *,
        start_position: int | None = None,
        dtype: str = "bfloat16",
    ) -> None:
        """Arm of one calibration per layer, in order.

        Parameters
        ----------
        start_position
            Absolute position of the first token of every prefix: keys are turned back by
            it.  By default the first one that is no sink.
        dtype
            What rows are stored as that are kept exactly, and everything comes back as.
            The default has 16 bits, as what ratios are measured against.

        Raises
        ------
        ValueError
            If there are none, or they are not of layers 0, 1, ... of the same heads.
        """
        stages = [calibration.stage for calibration in calibrations]
        heads = stages[0].num_heads if stages else 0
        if not stages or stages != [Stage(n, n + 1, 0, heads) for n in range(len(stages))]:
            raise ValueError(f"need a calibration of each layer, got {list(map(str, stages))}")
        if dtype not in TORCH_DTYPES:
            raise ValueError(f"need dtype in {list(TORCH_DTYPES)}, got {dtype!r}")
        config = calibrations[0].config
        self.name = f"layered-{config.target:g}x"
        self.start_position = config.sink_tokens if start_position is None else start_position
        self.dtype = dtype
        self.codecs = tuple(KvtcCodec(calibration) for calibration in calibrations)

    @property
    def calibration_bytes(self) -> int:
        """Bytes of all parameters: the fixed cost that no ratio shows."""
        return sum(codec.calibration.nbytes for codec in self.codecs)

    def restore(self, keys_TLHD: Tensor, values_TLHD: Tensor) -> Restored:
        """See `codec.comparators.arm.Arm.restore`; there must be a layer per calibration."""
        keys, values = checked(keys_TLHD, values_TLHD)
        if keys.shape[1] != len(self.codecs):
            raise ValueError(f"need {len(self.codecs)} layers, got {keys.shape[1]}")
        restored = [
            self._restore_layer(codec, keys[:, layer : layer + 1], values[:, layer : layer + 1])
            for layer, codec in enumerate(self.codecs)
        ]
        return Restored(
            keys_TLHD=torch.cat([part.keys_TLHD for part in restored], dim=1),
            values_TLHD=torch.cat([part.values_TLHD for part in restored], dim=1),
            stored_bytes=sum(part.stored_bytes for part in restored),
        )

    def _restore_layer(self, codec: KvtcCodec, keys: Tensor, values: Tensor) -> Restored:
        blob = codec.encode(
            keys.to(TORCH_DTYPES[self.dtype]),
            values.to(TORCH_DTYPES[self.dtype]),
            header=self._header(codec, len(keys)),
        )
        keys_again, values_again = codec.decode(blob)
        return Restored(
            keys_TLHD=keys_again.float(), values_TLHD=values_again.float(), stored_bytes=len(blob)
        )

    def _header(self, codec: KvtcCodec, num_tokens: int) -> BlobHeader:
        geometry = codec.calibration.geometry
        return BlobHeader(
            namespace=_NOBODY,
            codec=codec.codec_id,
            component=ComponentKey(ChunkKey(_NOBODY), codec.stage),
            start_position=self.start_position,
            num_tokens=num_tokens,
            first_token=0,
            last_token=0,
            dtype=self.dtype,
            num_layers=1,
            num_heads=codec.stage.num_heads,
            key_head_dim=geometry.key_head_dim,
            value_head_dim=geometry.value_head_dim,
        )
