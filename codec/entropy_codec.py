"""The codec of the entropy profile: one step in the model's own metric, rANS, in a blob.

Encoding one component of ``T`` tokens:

1. keys lose their rotary positions; rows are flattened layer-major;
2. each token's keys say how much its errors will matter: its *shift*;
3. rows are projected and quantized with one step, finer or coarser by the shift;
4. sinks, and tokens that would come back worse than the calibration allows, are stored as
   they are (`codec.exact_rows`);
5. symbols are coded by rANS under the calibration's static models, band by band.

Sections, after those of `codec.exact_rows`; empty ones are left out:

| name | content |
|---|---|
| ``shift`` | int8 per coded token |
| ``k.0.low`` ... | bit planes of a band's low bits, each from a byte of its own on |
| ``k.0.escapes`` ... | int32 little-endian numbers that no symbol of the band stands for |
| ``k.0`` ``v.0`` ``k.1`` ... | rANS stream of the band's symbols, kinds in turn, most important first |

A band's planes and escapes come before its stream, so that one whose stream is there is whole.

A blob that was cut after some band decodes with the bands it has (``allow_truncated``): the
missing coefficients come back as zero, which is a coarser code of the same rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from codec.blob import FORMAT_VERSION, Blob, BlobHeader, Buffer, Section, pack_blob, read_blob
from codec.codec import TORCH_DTYPES, check_identity, heads_within, layers_within, tokens_within
from codec.drift import DRIFT_BOUND, DriftWarning, drift_of
from codec.entropy.rans import decode_symbols, encode_symbols
from codec.entropy_calibration import NUM_BANDS, EntropyCalibration, EntropyKind
from codec.entropy_sections import (
    check_bytes,
    read_escapes,
    read_planes,
    read_shifts,
    stored,
)
from codec.errors import CorruptBlobError
from codec.exact_rows import (
    all_finite,
    checked_rows,
    exact_sections,
    exact_values,
    read_exact_rows,
    to_dtype,
)
from codec.geometry import Stage
from codec.identity import CodecId, digest
from codec.step_quantizer import (
    Floats,
    Ints,
    Layout,
    StepCodes,
    dequantize_steps,
    quantization_errors,
    quantize_steps,
)
from codec.symbol_classes import CLASSES_PER_OCTAVE, LADDER, ZERO_LEVEL, step_factor
from codec.timing import StepTimes

TOKENS_AT_ONCE = {2: 64, 4: 256}
"""By bytes of an element, tokens whose rows are 32-bit floats at a time while encoding.

Products want many; what the rows take is bounded against the cache's own memory.
"""


class EntropyCodec:
    """Codes components of one stage with one calibration; immutable, so threads may share it."""

    name = "entropy"
    #: What comes back is near what went in, not equal to it.
    is_lossless = False

    def __init__(self, calibration: EntropyCalibration, *, namespace: bytes | None = None) -> None:
        """Code with ``calibration``, and refuse blobs of another namespace if one is given."""
        self.calibration = calibration
        self.namespace = namespace
        self.codec_id = CodecId(
            digest(
                "kvfabric.codec.entropy",
                *(str(FORMAT_VERSION).encode(), LADDER.encode(), calibration.digest),
            )
        )
        self._kinds: Mapping[str, EntropyKind] = {"k": calibration.keys, "v": calibration.values}

    @property
    def stage(self) -> Stage:
        """The share of the model whose components it codes."""
        return self.calibration.stage

    def encode(
        self,
        keys_TLHD: Tensor,
        values_TLHD: Tensor,
        *,
        header: BlobHeader,
        steps: StepTimes | None = None,
    ) -> bytes:
        """See `codec.codec.Codec.encode`.

        Warns
        -----
        DriftWarning
            If the rows are less like the calibration's text than they should be.

        Raises
        ------
        ValueError
            Also if an element is not finite: such a cache must not be kept.
        """
        steps = steps or StepTimes()
        self._check_header(header)
        arrays = {
            "k": checked_rows("keys", keys_TLHD, header, header.key_head_dim),
            "v": checked_rows("values", values_TLHD, header, header.value_head_dim),
        }
        positions = torch.arange(header.start_position, header.start_position + header.num_tokens)
        is_exact = positions < self.calibration.config.sink_tokens
        coefficients = {
            kind: torch.zeros(part.rank, len(positions)) for kind, part in self._kinds.items()
        }
        energy = {kind: torch.zeros(len(positions)) for kind in self._kinds}
        shift_T = np.zeros(len(positions), np.int32)
        at_once = TOKENS_AT_ONCE[TORCH_DTYPES[header.dtype].itemsize]
        for start in range(0, len(positions), at_once):
            some = slice(start, start + at_once)
            for kind, part in self._kinds.items():
                with steps.step("rope"):
                    rows = (
                        self.calibration.rotary.unrotate(arrays[kind][some], positions[some])
                        if kind == "k"
                        else arrays[kind][some].float()
                    ).flatten(1)
                with steps.step("project"):
                    if kind == "k":
                        shift_T[some] = self.calibration.importance.shifts(rows)
                    rows = rows - part.mean_W
                    projected = self.calibration.project(part, rows, shift_T[some])
                    coefficients[kind][:, some] = projected
                    energy[kind][some] = part.metric.energy(rows)
        with steps.step("quantize"):
            is_exact |= self._is_outlier(coefficients, energy, shift_T, is_exact)
            coded = {kind: part[:, ~is_exact].numpy().T for kind, part in coefficients.items()}
            shift_T = shift_T[~is_exact.numpy()]
            codes = {kind: list(self._quantize(kind, coded[kind], shift_T)) for kind in coded}
        with steps.step("entropy"):
            sections = [
                *exact_sections(is_exact, arrays["k"], arrays["v"]),
                *self._coded_sections(codes, shift_T),
            ]
        return pack_blob(header, sections)

    def decode(
        self,
        buf: Buffer,
        *,
        layers: range | None = None,
        heads: range | None = None,
        num_tokens: int | None = None,
        steps: StepTimes | None = None,
        allow_truncated: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """See `codec.codec.Codec.decode`; a slice costs its share of the projection.

        Parameters
        ----------
        allow_truncated
            Take a blob whose end is missing, if what is there is whole bands.
        """
        steps = steps or StepTimes()
        with steps.step("verify"):
            blob = read_blob(buf, allow_truncated=allow_truncated)
            header = blob.header
            self._check_header(header)
        layers = layers_within(self.stage, layers)
        heads = heads_within(self.stage, heads)
        num_tokens = tokens_within(header, num_tokens)
        is_exact = read_exact_rows(blob)
        shift_T = read_shifts(blob, int((~is_exact).sum()))
        local = range(layers.start - self.stage.layer_start, layers.stop - self.stage.layer_start)
        columns = slice(heads.start - self.stage.head_start, heads.stop - self.stage.head_start)
        restored = []
        for kind in self._kinds:
            exact = exact_values(blob, kind, int(is_exact.sum()), local)[:, :, columns]
            restored.append(
                self._restore(
                    kind,
                    # Not kept here as well: these are a good part of the memory.
                    self._coefficients(blob, kind, shift_T, steps, allow_truncated),
                    shift_T=shift_T,
                    exact=exact,
                    is_exact=is_exact[:num_tokens],
                    local=local,
                    columns=columns,
                    header=header,
                    steps=steps,
                )
            )
        return restored[0], restored[1]

    def example(self, num_tokens: int, dtype: str) -> tuple[Tensor, Tensor]:
        """See `codec.codec.Codec.example`: rows drawn from the basis, keys at positions 0..T-1."""
        draw = torch.Generator().manual_seed(0)
        shape = self.calibration.geometry
        arrays = []
        for part, dim in (
            (self.calibration.keys, shape.key_head_dim),
            (self.calibration.values, shape.value_head_dim),
        ):
            spread_C = self.calibration.step * torch.exp2(
                (part.level_C - ZERO_LEVEL) / CLASSES_PER_OCTAVE
            )
            drawn = torch.randn(num_tokens, part.rank, generator=draw) * spread_C
            rows = part.rows(drawn)
            arrays.append(rows.view(num_tokens, shape.num_layers, shape.num_kv_heads, dim))
        keys = self.calibration.rotary.rotate(arrays[0], torch.arange(num_tokens))
        return keys.to(TORCH_DTYPES[dtype]), arrays[1].to(TORCH_DTYPES[dtype])

    def _check_header(self, header: BlobHeader) -> None:
        check_identity(
            header,
            codec_id=self.codec_id,
            namespace=self.namespace,
            stage=self.stage,
            geometry=self.calibration.geometry,
        )

    def _quantize(
        self, kind: str, values_TC: Floats, shift_T: Ints
    ) -> Iterator[tuple[Layout, StepCodes]]:
        """Layout and codes of each band."""
        step, classes = self.calibration.step, self.calibration.classes
        for band in self._kinds[kind].bands:
            layout = self._kinds[kind].layout.rows(band)
            yield layout, quantize_steps(values_TC[:, band], step, shift_T, layout, classes)

    def _is_outlier(
        self,
        coefficients: Mapping[str, Tensor],
        energy: Mapping[str, Tensor],
        shift_T: Ints,
        is_sink: Tensor,
    ) -> Tensor:
        """Which tokens would come back with more error than the calibration allows.

        The energy outside the basis and the quantization error add up, as the basis is
        orthonormal in the metric; neither needs the reconstruction.
        """
        calibration = self.calibration
        errors_T = torch.zeros(len(shift_T), dtype=torch.float64)
        square_step_T = torch.from_numpy(calibration.step * step_factor(shift_T)).double().square()
        drift = 0.0
        for kind, part in self._kinds.items():
            values = coefficients[kind]
            kept_T = values.square().sum(dim=0, dtype=torch.float64)
            outside_T = (energy[kind].double() - kept_T).clamp_min(0) / square_step_T
            arguments = (calibration.step, shift_T, part.layout, calibration.classes)
            left_T = torch.from_numpy(quantization_errors(values.numpy().T, *arguments))
            errors_T += outside_T + left_T
            # Held to the limit, so that one token, which is stored exactly, is no drift.
            drifting_T = outside_T[~is_sink].clamp_max(calibration.max_token_error)
            drift = max(drift, drift_of(drifting_T, part.outside_energy))
        if drift > DRIFT_BOUND:
            warnings.warn(DriftWarning(round(drift, 1)), stacklevel=3)
        # Not `>`: an error that overflowed is not a number, and such a row is exact too.
        return ~(errors_T <= calibration.max_token_error)

    def _coded_sections(
        self, codes: Mapping[str, list[tuple[Layout, StepCodes]]], shift_T: Ints
    ) -> Iterator[Section]:
        if not len(shift_T):
            return
        yield stored("shift", shift_T.astype(np.int8).tobytes())
        models = self.calibration.classes.models
        for number in range(NUM_BANDS):
            for kind, bands in codes.items():
                layout, part = bands[number]
                if not len(part.symbols_CT):
                    continue
                name = f"{kind}.{number}"
                # The stream comes last: where a cut left it, it left all of the band.
                if len(part.low_PT):
                    planes = np.packbits(part.low_PT, axis=1, bitorder="little").tobytes()
                    yield stored(f"{name}.low", planes)
                if len(part.escapes_N):
                    yield stored(f"{name}.escapes", part.escapes_N.astype("<i4").tobytes())
                stream = encode_symbols(part.symbols_CT, layout.level_C, models, shift_T)
                yield Section(name, stream, part.symbols_CT.size)

    def _coefficients(
        self, blob: Blob, kind: str, shift_T: Ints, steps: StepTimes, allow_truncated: bool
    ) -> Tensor:
        """Coefficients of the coded rows, shape ``(C, T')``; zero in bands that are missing."""
        part, calibration = self._kinds[kind], self.calibration
        result = torch.zeros(part.rank, len(shift_T))
        for number, band in enumerate(part.bands):
            layout = part.layout.rows(band)
            name = f"{kind}.{number}"
            if not len(layout.level_C) or not len(shift_T):
                continue
            if allow_truncated and name not in blob.sections:
                break
            with steps.step("entropy"):
                section = blob.section(name)
                check_bytes(section.decoded_bytes, len(layout.level_C) * len(shift_T), name)
                symbols = decode_symbols(
                    section.data,
                    layout.level_C,
                    calibration.classes.models,
                    len(shift_T),
                    shift_T=shift_T,
                )
                codes = StepCodes(
                    symbols,
                    read_planes(blob, f"{name}.low", layout.num_planes, len(shift_T)),
                    read_escapes(blob, f"{name}.escapes"),
                )
            with steps.step("dequantize"):
                values = dequantize_steps(
                    codes, calibration.step, shift_T, layout, calibration.classes
                )
                result[band] = torch.from_numpy(values.T)
        return result

    def _restore(
        self,
        kind: str,
        coefficients_CT: Tensor,
        *,
        shift_T: Ints,
        exact: Tensor,
        is_exact: Tensor,
        local: range,
        columns: slice,
        header: BlobHeader,
        steps: StepTimes,
    ) -> Tensor:
        """Rows of the wanted layers and heads in their places, in the blob's dtype."""
        num_coded = int((~is_exact).sum())
        head_dim = header.key_head_dim if kind == "k" else header.value_head_dim
        num_heads = columns.stop - columns.start
        dtype = TORCH_DTYPES[header.dtype]
        result = torch.empty((len(is_exact), len(local), num_heads, head_dim), dtype=dtype)
        result[is_exact] = exact[: int(is_exact.sum())]
        positions = torch.arange(header.start_position, header.start_position + len(is_exact))
        mean_W = self._kinds[kind].mean_W
        layer_width = len(mean_W) // self.stage.num_layers
        for group in self._kinds[kind].groups:
            if not (wanted := group.runs(layer_width, local)):
                continue
            with steps.step("project"):
                ranks = self.calibration.token_ranks(group, shift_T[:num_coded])
                mine_TC = coefficients_CT[group.columns_C].T[ranks.order_T]
            for some in wanted:
                rows = torch.empty(num_coded, len(some), num_heads, head_dim)
                with steps.step("project"):
                    for at, layer in enumerate(some):
                        start = layer * layer_width + columns.start * head_dim
                        inside = slice(start, start + num_heads * head_dim)
                        ordered = ranks.reconstruct(mine_TC, group.backward(inside), mean_W[inside])
                        rows[ranks.order_T, at] = ordered.view(num_coded, num_heads, head_dim)
                if not all_finite(rows):
                    raise CorruptBlobError(f"section {kind}.0", "a coefficient is too large")
                if kind == "k":
                    with steps.step("rope"):
                        rotary = self.calibration.rotary.of_layers(some)
                        rows = rotary.rotate(rows, positions[~is_exact])
                start = some.start - local.start
                result[~is_exact, start : start + len(some)] = to_dtype(rows, dtype)
        return result
