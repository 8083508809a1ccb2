"""`EntropyCodec`: what comes back, slices, cuts, chunks, and what is refused."""

from __future__ import annotations

import dataclasses
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from codec.blob import Section, pack_blob, read_blob
from codec.drift import DriftWarning
from codec.entropy_codec import EntropyCodec
from codec.errors import CorruptBlobError, IdentityMismatchError, UnsupportedVersionError
from codec.timing import StepTimes
from tests.codec.entropy_samples import (
    GEOMETRY,
    NAMESPACE,
    calibrated,
    calibrated_stage,
    codec_of,
    encoded,
    header,
    rotated_cache,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Squared error over the variance around the mean row."""
    wanted = wanted.float()
    return float((found.float() - wanted).square().sum() / (wanted - wanted.mean(0)).square().sum())


def resealed(blob: bytes, changes: dict[str, Section | None]) -> bytes:
    """The blob with sections replaced, added or removed, and all checksums right again."""
    read = read_blob(blob)
    sections: dict[str, Section | None] = {**read.sections, **changes}
    return pack_blob(read.header, [section for section in sections.values() if section])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 3, 5, 33, 256, 300])
@pytest.mark.parametrize("start", [0, 2, 512])
def test_a_chunk_comes_back_close(dtype: str, num_tokens: int, start: int) -> None:
    """Any dtype, odd sizes, with and without sinks in the chunk.

    These rows correlate across all layers, which directions of a group cannot make use of.
    """
    codec = codec_of(8.0)
    cached = rotated_cache(num_tokens, seed=1, start=start, dtype=dtype)

    decoded = codec.decode(encoded(codec, cached, start=start))

    for found, wanted in zip(decoded, cached, strict=True):
        assert found.dtype == wanted.dtype
        assert found.shape == wanted.shape
        assert torch.isfinite(found).all()
        assert num_tokens < 8 or relative_error(found, wanted) < 0.08


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_row_comes_back_worse_than_the_calibration_allows(dtype: str) -> None:
    """The error in the metric, in squares of the token's own step, rounding aside."""
    made, codec = calibrated(8.0), codec_of(8.0)
    keys, values = rotated_cache(256, seed=2, start=8, dtype=dtype)
    decoded = codec.decode(encoded(codec, (keys, values), start=8))

    error_T = torch.zeros(256)
    for found, wanted, part in zip(decoded, (keys, values), (made.keys, made.values), strict=True):
        rows = (found.float() - wanted.float(), torch.arange(8, 264))
        lost = made.rotary.unrotate(*rows) if part is made.keys else rows[0]
        error_T += part.metric.scale(lost.flatten(1)).square().sum(1)

    plain = made.rotary.unrotate(keys, torch.arange(8, 264)).flatten(1)
    step_T = made.step * torch.exp2(-torch.from_numpy(made.importance.shifts(plain)) / 4)
    assert (error_T / step_T**2 <= made.max_token_error * 1.05).all()
    assert float((error_T / step_T**2).mean()) < made.max_token_error


@pytest.mark.parametrize("target", [4.0, 8.0, 16.0])
def test_blobs_are_as_small_as_the_calibration_says(target: float) -> None:
    """Over a few chunks of text it has not seen, everything counted."""
    codec = codec_of(target)
    blobs = [encoded(codec, rotated_cache(256, seed=s, start=256), start=256) for s in range(4)]

    bits = 8 * sum(map(len, blobs)) / (4 * 256)

    assert bits == pytest.approx(calibrated(target).held_out_bits, rel=0.08)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_come_back_bit_for_bit(dtype: str) -> None:
    """The first four positions of a sequence, and only where the chunk has them."""
    codec = codec_of(8.0)
    for start, num_sinks in ((0, 4), (2, 2), (4, 0)):
        cached = rotated_cache(64, seed=3, start=start, dtype=dtype)

        decoded = codec.decode(encoded(codec, cached, start=start))

        for found, wanted in zip(decoded, cached, strict=True):
            assert torch.equal(found[:num_sinks], wanted[:num_sinks])
            assert not torch.equal(found[num_sinks], wanted[num_sinks])


def test_outliers_come_back_bit_for_bit() -> None:
    """Rows that would come back too wrong, in keys or in values; neighbours are coded.

    Two tokens, stored as they are, are no drift of the text: no warning, which would be an error.
    """
    codec = codec_of(8.0)
    keys, values = rotated_cache(64, seed=4, start=512)
    keys[10, 2, 1, 3] += 300
    values[20, 0, 0, 5] -= 300

    blob = encoded(codec, (keys, values), start=512)
    decoded = codec.decode(blob)

    assert len(read_blob(blob).section("exact.rows").data) == 8
    for row in (10, 20):
        assert torch.equal(decoded[0][row], keys[row])
        assert torch.equal(decoded[1][row], values[row])
    assert not torch.equal(decoded[0][11], keys[11])


def test_all_rows_may_be_exact() -> None:
    """A chunk of nothing but outliers, or of sinks: no coded section at all."""
    strict = EntropyCodec(dataclasses.replace(calibrated(8.0), max_token_error=0.0))
    keys, values = rotated_cache(40, seed=4, start=512)
    for codec, num_tokens, start in ((strict, 40, 512), (codec_of(8.0), 4, 0)):
        cached = keys[:num_tokens], values[:num_tokens]

        blob = encoded(codec, cached, start=start)

        assert set(read_blob(blob).sections) == {"exact.rows", "k.exact", "v.exact"}
        assert torch.equal(codec.decode(blob)[0], cached[0])
        assert torch.equal(codec.decode(blob, layers=range(1, 2))[1], cached[1][:, 1:2])


def test_numbers_at_the_limit_of_float16_come_back() -> None:
    """Rows at the range limit are outliers, and never become infinite."""
    codec = codec_of(8.0)
    keys, values = rotated_cache(16, seed=5, start=512, dtype="float16")
    keys[3] = 65504
    values[5, :, :, ::2] = -65504

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DriftWarning)
        decoded = codec.decode(encoded(codec, (keys, values), start=512))

    assert torch.equal(decoded[0][3], keys[3])
    assert torch.equal(decoded[1][5], values[5])
    assert torch.isfinite(decoded[0]).all()


def test_the_largest_floats_are_stored_exactly() -> None:
    """Energies that overflow are outliers too."""
    codec = codec_of(8.0)
    keys, values = rotated_cache(16, seed=5, start=512)
    keys[3], values[7] = 3e38, -3e38

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DriftWarning)
        decoded = codec.decode(encoded(codec, (keys, values), start=512))

    assert torch.equal(decoded[0][3], keys[3])
    assert torch.equal(decoded[1][7], values[7])
    assert torch.isfinite(decoded[0]).all()


slices = st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 1), st.integers(1, 2))


@settings(max_examples=40, deadline=None)
@given(slices, st.integers(1, 70), st.sampled_from([0, 2, 300]))
def test_a_slice_is_the_slice_of_the_whole(
    cut: tuple[int, int, int, int], num_tokens: int, start: int
) -> None:
    """Layers, heads and first tokens: the same numbers as decoding everything.

    Up to the order in which a product adds up: libraries choose it by the number of rows,
    so a slice of very few tokens may differ by a few units in the last place.
    """
    codec = codec_of(8.0)
    blob = encoded(codec, rotated_cache(70, seed=6, start=start), start=start)
    layers = range(cut[0], min(4, cut[0] + cut[1]))
    heads = range(cut[2], min(2, cut[2] + cut[3]))

    whole = codec.decode(blob)
    part = codec.decode(blob, layers=layers, heads=heads, num_tokens=num_tokens)

    for found, wanted in zip(part, whole, strict=True):
        expected = wanted[:num_tokens, layers.start : layers.stop, heads.start : heads.stop]
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_of_all_tokens_are_the_slice_bit_for_bit(dtype: str) -> None:
    """Each layer is a product of its own, whoever asks for it."""
    codec = codec_of(8.0)
    blob = encoded(codec, rotated_cache(70, seed=6, dtype=dtype))
    whole = codec.decode(blob)

    for start in range(4):
        for stop in range(start + 1, 5):
            for found, wanted in zip(
                codec.decode(blob, layers=range(start, stop)), whole, strict=True
            ):
                assert torch.equal(found, wanted[:, start:stop])


def borders(blob: bytes) -> dict[str, int]:
    """Where each section starts, and the end."""
    sections = read_blob(blob).sections
    sizes = [len(section.data) for section in sections.values()]
    front = len(blob) - sum(sizes)
    return dict(zip(sections, accumulate(sizes, initial=front), strict=False)) | {"": len(blob)}


def test_a_cut_blob_decodes_with_what_is_left() -> None:
    """At every section's border and within; the more there is, the smaller the error."""
    codec = codec_of(8.0)
    cached = rotated_cache(200, seed=7)
    blob = encoded(codec, cached)
    starts = list(borders(blob).values())
    first_coded = borders(blob)["shift"] + 196
    errors = []
    for at in sorted({near for start in starts for near in (start, start + 3)}):
        if first_coded <= at <= len(blob):
            found = codec.decode(blob[:at], allow_truncated=True)
            errors.append(sum(map(relative_error, found, cached)))
            assert torch.equal(found[0][:4], cached[0][:4])

    assert all(later <= before * 1.0001 for before, later in pairwise(errors))
    assert errors[0] > 1
    assert errors[-1] < 0.1
    assert len({round(error, 6) for error in errors}) == 7


def test_a_cut_blob_is_refused_unless_asked_for() -> None:
    """A miss, as any other damage; and nothing can be made of less than the shifts."""
    codec = codec_of(8.0)
    blob = encoded(codec, rotated_cache(200, seed=7))

    for at in sorted({*borders(blob).values()} - {len(blob)}):
        with pytest.raises(CorruptBlobError):
            codec.decode(blob[:at])
        if at <= borders(blob)["shift"]:
            with pytest.raises(CorruptBlobError):
                codec.decode(blob[:at], allow_truncated=True)


def test_a_blob_that_is_too_long_is_refused_in_any_case() -> None:
    """Truncation only ever takes bytes away."""
    codec = codec_of(8.0)
    blob = encoded(codec, rotated_cache(20, seed=7))

    for longer in (blob + b"\0", blob + blob):
        for allow_truncated in (False, True):
            with pytest.raises(CorruptBlobError, match="length"):
                codec.decode(longer, allow_truncated=allow_truncated)


def test_a_cut_does_not_excuse_damage() -> None:
    """What is there is verified as ever."""
    codec = codec_of(8.0)
    blob = bytearray(encoded(codec, rotated_cache(200, seed=7)))
    blob[borders(bytes(blob))["k.0"] + 5] ^= 1

    with pytest.raises(CorruptBlobError, match="checksum"):
        codec.decode(bytes(blob[:-10]), allow_truncated=True)


@pytest.mark.parametrize("layout", ["tokens first", "heads first"])
def test_chunks_of_a_growing_sequence_have_the_bytes_of_the_whole(layout: str) -> None:
    """Old chunks are never encoded again, however the engine lays out its cache."""
    codec = codec_of(8.0)
    cached = rotated_cache(3 * 64, seed=8)
    if layout == "heads first":
        cached = tuple(part.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3) for part in cached)

    def chunk(length: int, at: int, *, copy: bool) -> bytes:
        """Chunk ``at`` out of the first ``length`` tokens."""
        keys, values = (part[:length][64 * at : 64 * at + 64] for part in cached)
        if copy:
            keys, values = keys.contiguous(), values.contiguous()
        return encoded(codec, (keys, values), start=64 * at)

    at_once = [chunk(192, at, copy=False) for at in range(3)]
    growing = [chunk(64 * at + 64, at, copy=True) for at in range(3)]

    assert growing == at_once


def test_encoding_is_deterministic_in_threads() -> None:
    """One codec, four threads, the same bytes."""
    codec = codec_of(8.0)
    chunks = [rotated_cache(64, seed=seed, start=64) for seed in range(4)]
    alone = [encoded(codec, chunk, start=64) for chunk in chunks]

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda chunk: encoded(codec, chunk, start=64), chunks * 4))
        decoded = list(pool.map(lambda blob: codec.decode(blob)[0], alone * 2))

    assert together == alone * 4
    assert all(torch.equal(decoded[i], codec.decode(alone[i % 4])[0]) for i in range(8))


def test_stages_assemble_to_what_the_whole_model_holds() -> None:
    """Two pipeline stages' blobs next to the blob of a single stage."""
    keys, values = rotated_cache(128, seed=9, start=256)
    parts = []
    for stage in GEOMETRY.split_layers(2):
        codec = EntropyCodec(calibrated_stage(stage))
        layers = slice(stage.layer_start, stage.layer_stop)
        mine = keys[:, layers].contiguous(), values[:, layers].contiguous()
        blob = encoded(codec, mine, start=256, stage=stage)
        wanted = range(stage.layer_start, stage.layer_stop)
        parts.append(codec.decode(blob, layers=wanted))

    assembled = [torch.cat(pieces, dim=1) for pieces in zip(*parts, strict=True)]
    single = codec_of(4.0).decode(encoded(codec_of(4.0), (keys, values), start=256))

    for found, alone, wanted in zip(assembled, single, (keys, values), strict=True):
        assert found.shape == wanted.shape
        assert relative_error(found, wanted) < 0.03
        assert relative_error(alone, wanted) < 0.03


def test_the_codec_id_follows_the_calibration() -> None:
    """Another calibration is another codec; the same one is the same."""
    assert EntropyCodec(calibrated(8.0)).codec_id == codec_of(8.0).codec_id
    assert codec_of(4.0).codec_id != codec_of(8.0).codec_id


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"codec": b"x" * 16}, "codec"),
        ({"namespace": b"m" * 16}, "namespace"),
        ({"key_head_dim": 4}, "geometry"),
    ],
)
def test_another_identity_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    """A sound blob of something else is not decoded, nor written."""
    codec = EntropyCodec(calibrated(8.0), namespace=NAMESPACE)
    cached = rotated_cache(8, seed=6)
    blob = encoded(codec, cached)
    other = dataclasses.replace(header(codec.codec_id, 8), **change)

    with pytest.raises(IdentityMismatchError, match=field):
        codec.decode(pack_blob(other, list(read_blob(blob).sections.values())))
    with pytest.raises(IdentityMismatchError, match=field):
        codec.encode(*cached, header=other)


def test_another_stage_is_refused() -> None:
    """Bytes of a part of the model never pass for another part."""
    first, second = GEOMETRY.split_layers(2)
    cached = [part[:, :2].contiguous() for part in rotated_cache(8, seed=6)]
    codec = EntropyCodec(calibrated_stage(first))
    blob = encoded(codec, (cached[0], cached[1]), stage=first)

    with pytest.raises(IdentityMismatchError):
        EntropyCodec(calibrated_stage(second)).decode(blob)
    with pytest.raises(IdentityMismatchError, match="stage"):
        codec.encode(*cached, header=header(codec.codec_id, 8, stage=second))


def test_another_version_is_refused() -> None:
    """By its own error, and before anything is read."""
    codec = codec_of(8.0)
    blob = bytearray(encoded(codec, rotated_cache(8, seed=6)))
    blob[4] = 2

    with pytest.raises(UnsupportedVersionError):
        codec.decode(bytes(blob))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", [0, 1])
def test_a_cache_that_is_not_finite_is_not_stored(bad: float, which: int) -> None:
    """An engine that overflowed must not have its state kept, not even as an exact row."""
    cached = rotated_cache(8, seed=8)
    cached[which][1, 1, 0, 2] = bad

    with pytest.raises(ValueError, match="must be finite"):
        encoded(codec_of(8.0), cached)


def test_shapes_and_dtypes_must_be_those_of_the_header() -> None:
    """Bits are never reinterpreted."""
    codec = codec_of(8.0)
    keys, values = rotated_cache(8, seed=8)

    with pytest.raises(ValueError, match="keys must have shape"):
        codec.encode(keys[:7], values, header=header(codec.codec_id, 8))
    with pytest.raises(ValueError, match="keys must be bfloat16"):
        codec.encode(keys, values, header=header(codec.codec_id, 8, dtype="bfloat16"))
    with pytest.raises(ValueError, match="layers of stage"):
        codec.decode(encoded(codec, (keys, values)), layers=range(3, 5))
    with pytest.raises(ValueError, match="heads of stage"):
        codec.decode(encoded(codec, (keys, values)), heads=range(1, 3))


def test_text_far_from_the_calibration_is_warned_of() -> None:
    """And only that: text like the calibration's is coded in silence."""
    codec = codec_of(16.0)
    keys, values = rotated_cache(64, seed=9, start=64)
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(1))

    encoded(codec, (keys, values), start=64)
    with pytest.warns(DriftWarning, match="times the calibration's energy"):
        encoded(codec, (keys, values + 3 * noise), start=64)


def spoiled(blob: bytes, name: str, at: int, value: int) -> Section:
    """A section with one byte changed."""
    section = read_blob(blob).section(name)
    data = bytearray(section.data)
    data[at] = value
    return Section(name, bytes(data), section.decoded_bytes)


@pytest.mark.parametrize(
    "change",
    [
        {"shift": None},
        {"k.0": None},
        {"v.2": None},
        {"v.exact": None},
        {"exact.rows": None},
        {"k.0.low": None},
        {"k.0.low": Section("k.0.low", b"\0", 1)},
        {"k.1": Section("k.1", b"", 0)},
        {"k.0.escapes": Section("k.0.escapes", b"\0" * 3, 3)},
        {"k.0.escapes": Section("k.0.escapes", b"", 0)},
        {"k.1.escapes": Section("k.1.escapes", b"\xff\xff\xff\x7f" * 9, 36)},
        {"shift": Section("shift", b"\0" * 5, 5)},
        {"shift": Section("shift", b"\x0a" * 196, 196)},
        {"shift": Section("shift", b"\x80" * 196, 196)},
    ],
)
def test_a_sealed_but_inconsistent_blob_is_refused(change: dict[str, Section | None]) -> None:
    """Checksums prove that bytes are as written, not that the writer was right."""
    codec = codec_of(4.0)
    blob = encoded(codec, rotated_cache(200, seed=7))

    with pytest.raises(CorruptBlobError):
        codec.decode(resealed(blob, change))


@pytest.mark.parametrize("shift", [10, -10, -128, 127])
def test_a_shift_that_no_writer_makes_is_named(shift: int) -> None:
    """Before a step is made of it."""
    codec = codec_of(8.0)
    blob = encoded(codec, rotated_cache(20, seed=7))
    changed = spoiled(blob, "shift", 3, shift % 256)

    with pytest.raises(CorruptBlobError, match="section shift: a shift is over 9"):
        codec.decode(resealed(blob, {"shift": changed}))


@pytest.mark.parametrize("more", [-1, 1])
def test_a_stream_of_another_size_is_named(more: int) -> None:
    """What the table says a section decodes to is what it must decode to."""
    codec = codec_of(8.0)
    blob = encoded(codec, rotated_cache(20, seed=7))
    section = read_blob(blob).section("k.1")
    changed = dataclasses.replace(section, decoded_bytes=section.decoded_bytes + more)

    with pytest.raises(CorruptBlobError, match=r"section k\.1: need \d+ bytes"):
        codec.decode(resealed(blob, {"k.1": changed}))


def test_padding_bits_of_planes_are_zero() -> None:
    """Each blob has one form."""
    codec = codec_of(4.0)
    blob = encoded(codec, rotated_cache(201, seed=7))
    last = len(read_blob(blob).section("k.0.low").data) - 1

    with pytest.raises(CorruptBlobError, match="padding"):
        codec.decode(resealed(blob, {"k.0.low": spoiled(blob, "k.0.low", last, 0xFF)}))


def test_the_example_is_coded_like_text() -> None:
    """The same every time, without warnings, and near the size of the real thing."""
    codec = codec_of(8.0)
    keys, values = codec.example(256, "bfloat16")

    blob = encoded(codec, (keys, values))

    assert torch.equal(keys, codec.example(256, "bfloat16")[0])
    assert 0.5 < 8 * len(blob) / 256 / calibrated(8.0).held_out_bits < 2


def test_steps_are_timed_by_name() -> None:
    """Receipts and the latency model read these names."""
    codec, times, encode_times = codec_of(8.0), StepTimes(), StepTimes()
    keys, values = rotated_cache(20, seed=7)
    blob = codec.encode(keys, values, header=header(codec.codec_id, 20), steps=encode_times)

    codec.decode(blob, steps=times)

    assert set(times.seconds) == {"verify", "entropy", "dequantize", "project", "rope"}
    assert set(encode_times.seconds) == {"rope", "project", "quantize", "entropy"}
