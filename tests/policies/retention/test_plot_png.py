"""The painted picture: a valid PNG with the scene's pixels."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt
import pytest

from codec.errors import RetentionError
from policies.retention.plot import Box, Label, Scene
from policies.retention.plot_png import INK, encode, to_png


def decode(png: bytes) -> npt.NDArray[np.uint8]:
    """Pixels of a PNG as written here, every checksum verified; shape ``(Y, X, 3)``."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    chunks: list[tuple[bytes, bytes]] = []
    at = 8
    while at < len(png):
        (length,) = struct.unpack_from(">I", png, at)
        kind, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", png, at + 8 + length)[0] == zlib.crc32(kind + data)
        chunks.append((kind, data))
        at += 12 + length
    assert [kind for kind, _ in chunks] == [b"IHDR", b"IDAT", b"IEND"]
    width, height, *rest = struct.unpack(">IIBBBBB", chunks[0][1])
    assert rest == [8, 2, 0, 0, 0]
    rows = np.frombuffer(zlib.decompress(chunks[1][1]), np.uint8).reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3)


def test_boxes_are_painted_with_their_strength() -> None:
    """On white, one over the other."""
    scene = Scene(8, 4, (Box(1, 1, 3, 2, (200, 0, 100)), Box(3, 2, 2, 1, (0, 0, 0), 0.5)), ())
    pixels_YXC = decode(to_png(scene))

    assert pixels_YXC[0, 0].tolist() == [255, 255, 255]
    assert pixels_YXC[1, 1].tolist() == [200, 0, 100]
    assert pixels_YXC[2, 3].tolist() == [100, 0, 50]
    assert pixels_YXC[2, 4].tolist() == [128, 128, 128]


def test_text_is_painted_and_right_aligned() -> None:
    """An unknown letter leaves a blank."""
    left = decode(to_png(Scene(60, 20, (), (Label(4, 14, "11"),))))
    right = decode(to_png(Scene(60, 20, (), (Label(20, 14, "11", is_right=True),))))
    blank = decode(to_png(Scene(60, 20, (), (Label(4, 14, "\u2603"),))))

    assert (left == right).all()
    assert {tuple(pixel) for row in left for pixel in row} == {(255, 255, 255), INK}
    assert (blank == 255).all()


def test_letters_differ() -> None:
    """No two of the font look alike, but for o and 0 with its corners."""
    letters = "0123456789abcdefghijklmnopqrstuvwxyz.,:-+()/%_*="
    images = {
        decode(to_png(Scene(10, 14, (), (Label(1, 12, letter),)))).tobytes() for letter in letters
    }

    assert len(images) == len(letters)


def test_the_ending_of_the_name_decides() -> None:
    """And others are refused before anything is written."""
    scene = Scene(8, 4, (), ())

    assert encode(scene, ".PNG").startswith(b"\x89PNG")
    assert encode(scene, ".svg").startswith(b"<svg")
    for suffix in ("", ".jpg", "svg"):
        with pytest.raises(RetentionError) as caught:
            encode(scene, suffix)
        assert caught.value.rule == "bad-plot"
