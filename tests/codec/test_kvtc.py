"""`KvtcCodec`: what comes back, what slices cost nothing in, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.blob import Section, pack_blob, read_blob
from codec.calibration import Calibration
from codec.errors import CodecError, CorruptBlobError, IdentityMismatchError
from codec.geometry import Stage
from codec.kvtc import KvtcCodec
from codec.timing import StepTimes
from tests.codec.synthetic import GEOMETRY, NAMESPACE, cache, calibrated, header, of_stage


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    """Shared: it is immutable."""
    return calibrated()


@pytest.fixture(scope="module")
def codec(calibration: Calibration) -> KvtcCodec:
    """A codec for the whole model."""
    return KvtcCodec(calibration)


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Squared error over the variance around the mean row."""
    wanted = wanted.float()
    return float((found.float() - wanted).square().sum() / (wanted - wanted.mean(0)).square().sum())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("num_tokens", [1, 3, 5, 64, 257])
@pytest.mark.parametrize("start", [0, 2, 512])
def test_a_chunk_comes_back_close(
    codec: KvtcCodec, dtype: str, num_tokens: int, start: int
) -> None:
    """Any dtype, odd sizes, with and without sinks in the chunk."""
    keys, values = cache(num_tokens, seed=1, start=start, dtype=dtype)

    blob = codec.encode(
        keys, values, header=header(codec.codec_id, num_tokens, start=start, dtype=dtype)
    )
    keys_again, values_again = codec.decode(blob)

    assert keys_again.dtype == keys.dtype
    assert keys_again.shape == keys.shape
    assert values_again.shape == values.shape
    if num_tokens > 8:
        assert relative_error(keys_again, keys) < 0.01
        assert relative_error(values_again, values) < 0.02
    assert torch.isfinite(keys_again).all()


def test_sinks_come_back_bit_for_bit(codec: KvtcCodec) -> None:
    """The first four positions of a sequence, and only where the chunk has them."""
    keys, values = cache(64, seed=2)

    first = codec.decode(codec.encode(keys, values, header=header(codec.codec_id, 64)))

    assert torch.equal(first[0][:4], keys[:4])
    assert torch.equal(first[1][:4], values[:4])
    assert not torch.equal(first[0][4], keys[4])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2), st.integers(1, 3), st.sampled_from([0, 2, 300]))
def test_a_slice_is_the_slice_of_the_whole(
    num_tokens: int, first_layer: int, num_layers: int, start: int
) -> None:
    """Some layers, the first tokens: the same numbers as decoding everything."""
    codec = KvtcCodec(calibrated())
    keys, values = cache(40, seed=3, start=start)
    blob = codec.encode(keys, values, header=header(codec.codec_id, 40, start=start))
    layers = range(first_layer, min(3, first_layer + num_layers))

    whole = codec.decode(blob)
    part = codec.decode(blob, layers=layers, num_tokens=num_tokens)

    for found, wanted in zip(part, whole, strict=True):
        expected = wanted[:num_tokens, layers.start : layers.stop]
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_stages_code_their_own_layers_and_heads() -> None:
    """Two pipeline stages together give what one would, each within its own basis."""
    keys, values = cache(64, seed=4, start=256)
    for stage in GEOMETRY.split_layers(2):
        codec = KvtcCodec(calibrated(stage=stage, target=1.5))
        mine = of_stage(keys, stage), of_stage(values, stage)

        blob = codec.encode(*mine, header=header(codec.codec_id, 64, start=256, stage=stage))
        layers = range(stage.layer_start, stage.layer_stop)

        assert relative_error(codec.decode(blob, layers=layers)[0], mine[0]) < 0.02


def test_encoding_is_deterministic(codec: KvtcCodec) -> None:
    """Equal input, equal bytes: blobs can be compared by digest."""
    keys, values = cache(32, seed=5)
    wanted = header(codec.codec_id, 32)

    assert codec.encode(keys, values, header=wanted) == codec.encode(
        keys.clone(), values.clone(), header=wanted
    )


def test_the_codec_id_follows_the_calibration(calibration: Calibration, codec: KvtcCodec) -> None:
    """Another calibration is another codec; the same one is the same."""
    assert KvtcCodec(calibration).codec_id == codec.codec_id
    assert KvtcCodec(calibrated(target=8.0)).codec_id != codec.codec_id


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"codec": b"x" * 16}, "codec"),
        ({"namespace": b"m" * 16}, "namespace"),
        ({"key_head_dim": 4}, "geometry"),
    ],
)
def test_another_identity_is_refused_by_name(
    calibration: Calibration, change: dict[str, object], field: str
) -> None:
    """A sound blob of something else is not decoded, nor written."""
    codec = KvtcCodec(calibration, namespace=NAMESPACE)
    keys, values = cache(8, seed=6)
    good = header(codec.codec_id, 8)
    sections = read_blob(codec.encode(keys, values, header=good)).sections
    other = dataclasses.replace(good, **change)  # type: ignore[arg-type]

    with pytest.raises(IdentityMismatchError, match=field):
        codec.decode(pack_blob(other, list(sections.values())))
    with pytest.raises(IdentityMismatchError, match=field):
        codec.encode(keys, values, header=other)


def test_another_stage_is_refused(codec: KvtcCodec) -> None:
    """Bytes of a part of the model never pass for another part."""
    stage = Stage(0, 2, 0, 2)
    half = KvtcCodec(calibrated(stage=stage))
    keys, values = (of_stage(array, stage) for array in cache(8, seed=6))
    blob = half.encode(keys, values, header=header(half.codec_id, 8, stage=stage))

    with pytest.raises(IdentityMismatchError):
        codec.decode(blob)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_damaged_blob_is_decoded(data: st.DataObject) -> None:
    """Flips, cuts and extensions anywhere raise a codec error, never tensors."""
    codec = _shared_codec()
    blob = bytearray(_shared_blob())
    how = data.draw(st.sampled_from(["flip", "cut", "extend"]))
    at = data.draw(st.integers(0, len(blob) - 1))
    if how == "flip":
        blob[at] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "cut":
        del blob[at:]
    else:
        blob += data.draw(st.binary(min_size=1, max_size=9))

    with pytest.raises(CodecError):
        codec.decode(bytes(blob))


_made: dict[str, object] = {}


def _shared_codec() -> KvtcCodec:
    if "codec" not in _made:
        _made["codec"] = KvtcCodec(calibrated())
    codec = _made["codec"]
    assert isinstance(codec, KvtcCodec)
    return codec


def _shared_blob() -> bytes:
    codec = _shared_codec()
    return codec.encode(*cache(20, seed=7), header=header(codec.codec_id, 20))


def _resealed(blob: bytes, name: str, section: Section | None) -> bytes:
    """The blob with one section replaced or removed, and all checksums right again."""
    read = read_blob(blob)
    sections = dict(read.sections)
    if section is None:
        del sections[name]
    else:
        sections[name] = section
    return pack_blob(read.header, list(sections.values()))


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("k.fp8", None),
        ("k.shift", None),
        ("v.exact", None),
        ("k.exact", None),
        ("k.scale", Section("k.scale", b"\x03\x00", 5)),
        ("k.fp8", Section("k.fp8", b"not deflate", 16 * 16)),
        ("exact.rows", Section("exact.rows", b"\x00", 1)),
        ("exact.rows", Section("exact.rows", b"\x00" * 16, 16)),
        ("exact.rows", Section("exact.rows", b"\xff" * 16, 16)),
        ("exact.rows", Section("exact.rows", b"\x00\x00\x00\x00", 4)),
    ],
)
def test_a_sealed_but_inconsistent_blob_is_refused(name: str, section: Section | None) -> None:
    """Checksums prove that bytes are as written, not that the writer was right."""
    with pytest.raises(CorruptBlobError):
        _shared_codec().decode(_resealed(_shared_blob(), name, section))


def test_codes_that_decode_to_not_a_number_are_refused() -> None:
    """E4M3 has NaN codes that no writer of ours makes."""
    codec = _shared_codec()
    read = read_blob(_shared_blob())
    size = read.section("k.fp8").decoded_bytes
    poisoned = Section("k.fp8", codec._coder.encode(b"\x7f" * size), size)

    with pytest.raises(CorruptBlobError, match="not a number"):
        codec.decode(_resealed(_shared_blob(), "k.fp8", poisoned))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_cache_that_is_not_finite_is_not_stored(codec: KvtcCodec, bad: float) -> None:
    """An engine that overflowed must not have its state kept."""
    keys, values = cache(8, seed=8)
    values[3, 1, 0, 2] = bad

    with pytest.raises(ValueError, match="values must be finite"):
        codec.encode(keys, values, header=header(codec.codec_id, 8))


def test_shapes_and_dtypes_must_be_those_of_the_header(codec: KvtcCodec) -> None:
    """Bits are never reinterpreted."""
    keys, values = cache(8, seed=8)

    with pytest.raises(ValueError, match="keys must have shape"):
        codec.encode(keys[:7], values, header=header(codec.codec_id, 8))
    with pytest.raises(ValueError, match="keys must be bfloat16"):
        codec.encode(keys, values, header=header(codec.codec_id, 8, dtype="bfloat16"))


@pytest.mark.parametrize("layers", [range(0), range(2, 4), range(0, 3, 2)])
def test_layers_outside_the_stage_are_refused(codec: KvtcCodec, layers: range) -> None:
    """A caller's mistake, not a miss."""
    with pytest.raises(ValueError, match="layers of stage"):
        _shared_codec().decode(_shared_blob(), layers=layers)


def test_steps_are_timed_by_name(codec: KvtcCodec) -> None:
    """Receipts and the latency model read these names."""
    times = StepTimes()

    _shared_codec().decode(_shared_blob(), steps=times)

    assert list(times.seconds) == ["verify", "entropy", "dequantize", "project", "rope"]
    assert all(seconds > 0 for seconds in times.seconds.values())
