"""`RawCodec`: what comes out is what went in, bit for bit, or nothing does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codec.blob import BlobHeader, Section, pack_blob, read_blob
from codec.codec import TORCH_DTYPES, Codec
from codec.errors import CorruptBlobError, IdentityMismatchError, UnsupportedVersionError
from codec.geometry import KVGeometry, Stage
from codec.identity import ChunkKey, ComponentKey
from codec.raw import RawCodec
from tests.codec.samples import STAGE, a_header

GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=3, key_head_dim=5, value_head_dim=4)
DTYPES = sorted(TORCH_DTYPES)
#: Tokens, layers, heads, key dim, value dim.
SHAPES = [(1, 1, 1, 1, 1), (1, 2, 1, 3, 1), (3, 1, 5, 1, 7), (7, 3, 2, 5, 9), (256, 2, 3, 64, 64)]
#: Bit patterns that arithmetic, or a detour through another type, would change: zeros,
#: infinities, subnormals, quiet and signalling not-a-numbers with payloads.
SPECIAL_BITS = {
    "float32": [0x80000000, 0xFF800000, 0x00000001, 0x7FC00001, 0x7F800001, 0xFFBFFFFF],
    "bfloat16": [0x8000, 0xFF80, 0x0001, 0x7FC1, 0x7F81, 0xFFBF],
    "float16": [0x8000, 0xFC00, 0x0001, 0x7E01, 0x7C01, 0xFDFF],
}


def a_codec(dtype: str = "bfloat16", **changes: Any) -> RawCodec:
    """A codec of the sample's stage."""
    return RawCodec(STAGE, GEOMETRY, dtype, **changes)


def header_for(raw: RawCodec, num_tokens: int = 5, **changes: Any) -> BlobHeader:
    """A header of that codec."""
    fields: dict[str, Any] = {
        "codec": raw.codec_id,
        "num_tokens": num_tokens,
        "first_token": 7,
        "last_token": 7,
        "dtype": raw.dtype,
        "key_head_dim": raw.geometry.key_head_dim,
        "value_head_dim": raw.geometry.value_head_dim,
    }
    return a_header(stage=raw.stage, **{**fields, **changes})


def random_bits(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    """A tensor of any bits at all, not-a-numbers among them."""
    torch_dtype = TORCH_DTYPES[dtype]
    num_bytes = int(np.prod(shape)) * torch_dtype.itemsize
    bits = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
    return torch.from_numpy(bits).view(torch_dtype).reshape(shape)


def a_cache(
    codec: RawCodec, num_tokens: int = 5, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that ``codec`` takes."""
    g = codec.geometry
    shape = (num_tokens, g.num_layers, g.num_kv_heads)
    return (
        random_bits((*shape, g.key_head_dim), codec.dtype, seed),
        random_bits((*shape, g.value_head_dim), codec.dtype, seed + 1),
    )


def assert_same_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal in shape, dtype and every bit; not-a-numbers included."""
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (found, wanted)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bits_come_back(dtype: str, shape: tuple[int, int, int, int, int]) -> None:
    """Every type, and every size that is odd in some way."""
    num_tokens, num_layers, num_heads, key_dim, value_dim = shape
    geometry = KVGeometry(
        num_layers=num_layers,
        num_kv_heads=num_heads,
        key_head_dim=key_dim,
        value_head_dim=value_dim,
    )
    codec = RawCodec(Stage(9, 9 + num_layers, 4, 4 + num_heads), geometry, dtype)
    keys, values = a_cache(codec, num_tokens)

    decoded_keys, decoded_values = codec.decode(
        codec.encode(keys, values, header=header_for(codec, num_tokens))
    )

    assert_same_bits(decoded_keys, keys)
    assert_same_bits(decoded_values, values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_keep_their_bits(dtype: str) -> None:
    """Signs of zeros, payloads of not-a-numbers, subnormals."""
    codec = RawCodec(
        Stage(0, 1, 0, 1),
        KVGeometry(num_layers=1, num_kv_heads=1, key_head_dim=6, value_head_dim=6),
        dtype,
    )
    unsigned = np.uint32 if dtype == "float32" else np.uint16
    bits = np.array(SPECIAL_BITS[dtype], dtype=unsigned)
    row = torch.from_numpy(bits.view(np.uint8)).view(TORCH_DTYPES[dtype]).reshape(1, 1, 1, 6)

    keys, _ = codec.decode(codec.encode(row, row, header=header_for(codec, 1)))

    assert keys.flatten().view(torch.uint8).numpy().view(unsigned).tolist() == SPECIAL_BITS[dtype]


def test_the_stored_form_is_the_documented_one() -> None:
    """One section per layer, named by the model's layer, keys before values."""
    codec = a_codec()
    keys, values = a_cache(codec)

    blob = read_blob(codec.encode(keys, values, header=header_for(codec)))

    assert list(blob.sections) == ["k2", "k3", "v2", "v3"]
    for layer in (0, 1):
        for kind, array in (("k", keys), ("v", values)):
            section = blob.section(f"{kind}{layer + 2}")
            wanted = array[:, layer].contiguous().view(torch.uint8).numpy().tobytes()
            assert bytes(section.data) == wanted
            assert section.decoded_bytes == len(wanted)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        lambda t: torch.stack([t, t], dim=-1)[..., 0],
        lambda t: t.flip(0).flip(0).requires_grad_(),
    ],
    ids=["layer-major", "every second element", "wanting a gradient"],
)
def test_strides_do_not_matter(view: Any) -> None:
    """Engines hand over views of their pages; equal arrays make equal blobs."""
    codec = a_codec("float32")
    keys, values = a_cache(codec)
    header = header_for(codec)

    assert codec.encode(view(keys), view(values), header=header) == codec.encode(
        keys, values, header=header
    )


def test_a_single_element_of_odd_stride_is_stored() -> None:
    """Torch calls it contiguous, and yet will not view it as bytes."""
    codec = RawCodec(
        Stage(0, 1, 0, 1),
        KVGeometry(num_layers=1, num_kv_heads=1, key_head_dim=1, value_head_dim=1),
        "float32",
    )
    odd = torch.full((8,), 2.5).as_strided((1, 1, 1, 1), (7, 7, 7, 7))
    assert odd.is_contiguous()

    keys, _ = codec.decode(codec.encode(odd, odd, header=header_for(codec, 1)))

    assert keys.item() == 2.5


@given(
    dtype=st.sampled_from(DTYPES),
    bounds=st.tuples(st.integers(2, 5), st.integers(2, 5)).filter(lambda b: b[0] != b[1]),
    num_tokens=st.integers(1, 6),
)
def test_a_slice_equals_the_slice_of_the_whole(
    dtype: str, bounds: tuple[int, int], num_tokens: int
) -> None:
    """Any layers, any number of first tokens."""
    codec = RawCodec(Stage(2, 5, 0, 3), replace(GEOMETRY, num_layers=3), dtype)
    keys, values = a_cache(codec, 6)
    data = codec.encode(keys, values, header=header_for(codec, 6))
    start, stop = sorted(bounds)

    sliced = codec.decode(data, layers=range(start, stop), num_tokens=num_tokens)

    for found, whole in zip(sliced, (keys, values), strict=True):
        assert_same_bits(found, whole[:num_tokens, start - 2 : stop - 2])


def test_a_slice_reads_only_its_own_sections() -> None:
    """Damage to another layer is not seen, and so neither are its bytes."""
    codec = a_codec()
    keys, values = a_cache(codec)
    data = bytearray(codec.encode(keys, values, header=header_for(codec)))
    data[-1] ^= 1  # The last byte of layer 3's values.

    assert_same_bits(codec.decode(data, layers=range(2, 3))[0], keys[:, :1])
    for asked in (None, range(3, 4), range(2, 4)):
        with pytest.raises(CorruptBlobError, match="section v3: checksum"):
            codec.decode(data, layers=asked, num_tokens=1)


def test_every_flipped_bit_is_detected() -> None:
    """No tensor comes out of a blob that differs in any bit from what was written."""
    codec = a_codec()
    data = codec.encode(*a_cache(codec, 2), header=header_for(codec, 2))

    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises((CorruptBlobError, UnsupportedVersionError)):
            codec.decode(damaged)


def test_decoded_tensors_are_the_callers_own() -> None:
    """They can be written to, and the buffer may be reused at once."""
    codec = a_codec("float32")
    keys, values = a_cache(codec)
    data = bytearray(codec.encode(keys, values, header=header_for(codec)))

    decoded_keys, decoded_values = codec.decode(data)
    data[:] = bytes(len(data))

    assert_same_bits(decoded_keys, keys)
    decoded_values.zero_()
    assert not decoded_values.any()


def test_a_raw_codec_is_a_codec() -> None:
    """The type checker compares the signatures; this compares the names."""
    codec: Codec = a_codec()

    assert (codec.name, codec.stage, len(codec.codec_id)) == ("raw", STAGE, 16)


def test_the_identity_is_pinned() -> None:
    """Another digest would turn every stored raw component into a miss."""
    assert a_codec().codec_id.hex() == "54221b1f0fb30d117e814a8421701d4b"


def test_whatever_changes_the_bytes_changes_the_identity() -> None:
    """And nothing else does: a namespace says what the KV is, not how it is stored."""
    geometries = [replace(GEOMETRY, key_head_dim=4), replace(GEOMETRY, value_head_dim=5)]
    codecs = [
        *(a_codec(dtype) for dtype in DTYPES),
        *(RawCodec(STAGE, geometry, "bfloat16") for geometry in geometries),
        RawCodec(Stage(3, 5, 0, 3), GEOMETRY, "bfloat16"),
        RawCodec(Stage(2, 4, 3, 6), GEOMETRY, "bfloat16"),
    ]

    assert len({codec.codec_id for codec in codecs}) == len(codecs)
    assert a_codec(namespace=bytes(16)).codec_id == a_codec().codec_id


@pytest.mark.parametrize(
    ("stage", "dtype", "why"),
    [
        (Stage(2, 5, 0, 3), "bfloat16", r"need the geometry of stage l2-5\.h0-3"),
        (Stage(2, 4, 0, 2), "bfloat16", r"need the geometry of stage l2-4\.h0-2"),
        (STAGE, "float64", "dtype must be one of"),
        (STAGE, "torch.float16", "dtype must be one of"),
    ],
)
def test_a_codec_that_could_not_work_is_refused(stage: Stage, dtype: str, why: str) -> None:
    """At construction, not at the first request."""
    with pytest.raises(ValueError, match=why):
        RawCodec(stage, GEOMETRY, dtype)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda k, v: (k[:4], v), r"k must have shape \(5, 2, 3, 5\), got \(4, 2, 3, 5\)"),
        (lambda k, v: (k, v[:, :1]), r"v must have shape \(5, 2, 3, 4\)"),
        (lambda k, v: (v, k), "k must have shape"),
        (lambda k, v: (k.flatten(1), v), "k must have shape"),
        (lambda k, v: (k.float(), v), r"k must be bfloat16, got torch\.float32"),
        (lambda k, v: (k, v.view(torch.float16)), r"v must be bfloat16, got torch\.float16"),
    ],
)
def test_a_tensor_that_is_not_what_the_header_says_is_refused(change: Any, why: str) -> None:
    """Bytes of another shape or type would be stored under a false name."""
    codec = a_codec()

    with pytest.raises(ValueError, match=why):
        codec.encode(*change(*a_cache(codec)), header=header_for(codec))


#: Headers that are not of the sample codec, by the field that says so.
FOREIGN: dict[str, dict[str, Any]] = {
    "codec": {"codec": bytes(16)},
    "namespace": {"namespace": bytes(16)},
    "stage": {"component": ComponentKey(ChunkKey(bytes(16)), Stage(3, 5, 0, 3))},
    "geometry": {"value_head_dim": 6},
    "dtype": {"dtype": "float16"},
}


@pytest.mark.parametrize("field", FOREIGN)
def test_a_foreign_header_is_refused_both_ways(field: str) -> None:
    """Neither written nor decoded, even where every byte is sound."""
    codec = a_codec(namespace=bytes(range(16)))
    keys, values = a_cache(codec)
    header = header_for(codec, **FOREIGN[field])
    sections = read_blob(codec.encode(keys, values, header=header_for(codec))).sections

    with pytest.raises(IdentityMismatchError) as caught:
        codec.encode(keys, values, header=header)
    assert caught.value.field == field
    with pytest.raises(IdentityMismatchError) as caught:
        codec.decode(pack_blob(header, list(sections.values())))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ([Section("k2", bytes(150), 150)], "section k3: is missing"),
        ([Section("k2", bytes(149), 150)], "section k2: need 150 bytes"),
        ([Section("k2", bytes(150), 149)], "section k2: need 150 bytes"),
        ([Section("k2", b"", 0)], "section k2: need 150 bytes"),
    ],
)
def test_a_sound_blob_of_the_wrong_sections_is_refused(sections: list[Section], why: str) -> None:
    """Right identity and right checksums do not make up for bytes that are not there."""
    codec = a_codec()
    rest = [] if "missing" in why else [Section("k3", bytes(150), 150)]

    with pytest.raises(CorruptBlobError, match=why):
        codec.decode(pack_blob(header_for(codec), [*sections, *rest]))


@pytest.mark.parametrize(
    "asked", [{"layers": range(1, 3)}, {"layers": range(0)}, {"num_tokens": 0}, {"num_tokens": 6}]
)
def test_a_slice_outside_the_blob_is_refused(asked: dict[str, Any]) -> None:
    """A caller's mistake is no miss."""
    codec = a_codec()
    data = codec.encode(*a_cache(codec), header=header_for(codec))

    with pytest.raises(ValueError, match="need"):
        codec.decode(data, **asked)
