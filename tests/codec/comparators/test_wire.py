"""Codes and floats to bytes and back, against bits written one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codec.comparators.wire import (
    Reader,
    codes_bytes,
    pack_codes,
    tensor_bytes,
    to_bfloat16,
    unpack_codes,
)


@st.composite
def code_lists(draw: st.DrawFn) -> tuple[int, list[int]]:
    """Some bits, and codes that fit in them."""
    bits = draw(st.integers(1, 8))
    return bits, draw(st.lists(st.integers(0, 2**bits - 1), max_size=40))


@given(code_lists())
def test_codes_are_one_string_of_bits(case: tuple[int, list[int]]) -> None:
    """The oracle adds each code's bits to one large number."""
    bits, codes = case
    number = sum(code << (place * bits) for place, code in enumerate(codes))
    wanted = number.to_bytes((len(codes) * bits + 7) // 8, "little")

    data = pack_codes(torch.tensor(codes, dtype=torch.uint8), bits)

    assert data == wanted
    assert len(data) == codes_bytes(len(codes), bits)
    assert unpack_codes(data, len(codes), bits).tolist() == codes


def test_codes_of_any_shape_are_taken_in_order() -> None:
    """Also of an array that is not contiguous."""
    codes = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.uint8)

    assert unpack_codes(pack_codes(codes.T, 3), 6, 3).tolist() == [1, 4, 2, 5, 3, 6]


@pytest.mark.parametrize("bits", [0, 9])
def test_other_widths_are_refused(bits: int) -> None:
    """A code is a byte at most."""
    with pytest.raises(ValueError, match=r"need 1\.\.8 bits"):
        pack_codes(torch.zeros(1, dtype=torch.uint8), bits)
    with pytest.raises(ValueError, match=r"need 1\.\.8 bits"):
        unpack_codes(b"", 0, bits)


def test_a_code_that_does_not_fit_is_refused() -> None:
    """It would spill into its neighbour."""
    with pytest.raises(ValueError, match="code 8 does not fit in 3 bits"):
        pack_codes(torch.tensor([7, 8], dtype=torch.uint8), 3)


@pytest.mark.parametrize("length", [0, 1, 3])
def test_codes_of_another_length_are_refused(length: int) -> None:
    """Five codes of three bits are two bytes."""
    with pytest.raises(ValueError, match="need 2 bytes of codes"):
        unpack_codes(bytes(length), 5, 3)


def test_a_reader_takes_arrays_in_the_order_they_were_written() -> None:
    """Codes, then floats; an array of nothing takes nothing."""
    codes = torch.tensor([[1, 0, 3]], dtype=torch.uint8)
    halves = torch.tensor([[1.5], [-2.0]], dtype=torch.float16)

    reader = Reader(pack_codes(codes, 2) + tensor_bytes(halves))

    assert torch.equal(reader.codes((1, 3), 2), codes)
    assert reader.elements((0, 4), torch.float32).shape == (0, 4)
    assert torch.equal(reader.elements((2, 1), torch.float16), halves)
    reader.close()


def test_a_reader_minds_every_byte() -> None:
    """Too few are refused when they are asked for, too many at the end."""
    reader = Reader(b"abc")

    with pytest.raises(ValueError, match="need 4 more bytes, 3 are left"):
        reader.take(4)
    assert reader.take(2) == b"ab"
    with pytest.raises(ValueError, match="1 bytes are left over"):
        reader.close()


def test_bfloat16_never_becomes_infinite() -> None:
    """The greatest float32 would round up past what is finite."""
    limit = torch.finfo(torch.float32).max

    rounded = to_bfloat16(torch.tensor([limit, -limit, 1.0, 1.0 + 2**-9]))

    assert rounded.float().tolist() == [
        torch.finfo(torch.bfloat16).max,
        -torch.finfo(torch.bfloat16).max,
        1.0,
        1.0,
    ]
