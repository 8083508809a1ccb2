"""Packing: exact round trips, a stated bit order, and nothing tolerated on reading."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codec.errors import CorruptBlobError
from codec.packing import pack, pack_halves, packed_bytes, unpack, unpack_halves


@given(
    num_tokens=st.integers(0, 13),
    num_coefficients=st.integers(0, 7),
    bits=st.sampled_from([2, 4, 8]),
    seed=st.integers(0, 2**32 - 1),
)
def test_codes_come_back(num_tokens: int, num_coefficients: int, bits: int, seed: int) -> None:
    """Any number of tokens and coefficients, odd ones included."""
    draw = np.random.default_rng(seed)
    codes = torch.from_numpy(
        draw.integers(0, 2**bits, (num_tokens, num_coefficients), dtype=np.uint8)
    )

    data = pack(codes, bits)
    again = unpack(data, num_tokens=num_tokens, num_coefficients=num_coefficients, bits=bits)

    assert len(data) == packed_bytes(num_tokens, num_coefficients, bits)
    assert torch.equal(again, codes)


def test_a_byte_holds_four_tokens_of_one_coefficient() -> None:
    """Lowest bits hold the earliest token; a coefficient starts on a byte border."""
    codes_TC = torch.tensor([[1, 3], [2, 0], [3, 1], [0, 2], [1, 1]], dtype=torch.uint8)

    assert pack(codes_TC, 2) == bytes([0b00_11_10_01, 0b01, 0b10_01_00_11, 0b01])


@pytest.mark.parametrize("bits", [2, 4])
def test_a_code_that_does_not_fit_is_refused(bits: int) -> None:
    """It would spill into its neighbour."""
    with pytest.raises(ValueError, match="does not fit"):
        pack(torch.tensor([[2**bits]], dtype=torch.uint8), bits)


@pytest.mark.parametrize("bits", [0, 1, 3, 16])
def test_other_widths_are_refused(bits: int) -> None:
    """Only what divides a byte, and what the block types need."""
    with pytest.raises(ValueError, match="2, 4 or 8"):
        pack(torch.zeros(1, 1, dtype=torch.uint8), bits)


@given(st.integers(-3, 3).filter(bool))
def test_a_wrong_length_is_refused(extra: int) -> None:
    """Cut or extended codes never shift into other coefficients."""
    data = pack(torch.ones(5, 3, dtype=torch.uint8), 4)
    wrong = data[:extra] if extra < 0 else data + bytes(extra)

    with pytest.raises(CorruptBlobError, match="need 9 bytes"):
        unpack(wrong, num_tokens=5, num_coefficients=3, bits=4)


def test_set_padding_bits_are_refused() -> None:
    """There is one encoding of a matrix, and it is checked."""
    with pytest.raises(CorruptBlobError, match="padding"):
        unpack(b"\x10", num_tokens=2, num_coefficients=1, bits=2)


@given(st.integers(0, 6), st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_halves_come_back_bit_for_bit(num_tokens: int, num_columns: int, seed: int) -> None:
    """Signs of zero and subnormals included."""
    draw = np.random.default_rng(seed)
    bits = draw.integers(0, 2**16, (num_tokens, num_columns)).astype(np.uint16)
    bits[(bits & 0x7C00) == 0x7C00] = 0x8001
    values = torch.from_numpy(bits.view(np.float16))

    again = unpack_halves(pack_halves(values), num_tokens=num_tokens, num_columns=num_columns)

    assert np.array_equal(again.numpy().view(np.uint16), bits)


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00])
def test_a_scale_that_is_not_finite_is_refused(bits: int) -> None:
    """An infinity or NaN would spread over a whole block."""
    data = pack_halves(torch.from_numpy(np.array([[bits]], dtype=np.uint16).view(np.float16)))

    with pytest.raises(CorruptBlobError, match="not finite"):
        unpack_halves(data, num_tokens=1, num_columns=1)


def test_halves_of_a_wrong_length_are_refused() -> None:
    """As for codes."""
    with pytest.raises(CorruptBlobError, match="need 8 bytes"):
        unpack_halves(bytes(7), num_tokens=2, num_columns=2)
