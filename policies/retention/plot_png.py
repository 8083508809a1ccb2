"""Paint a scene of `policies.retention.plot` as a PNG, with the standard library alone.

Text is set in a 3x5 font at twice its size; letters that it lacks are left blank.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

import numpy as np
import numpy.typing as npt

from codec.errors import RetentionError
from policies.retention.plot import Label, Scene, to_svg

SCALE: Final = 2
ADVANCE: Final = 4 * SCALE
"""Pixels from one letter to the next."""

INK: Final = (40, 40, 40)

#: Rows of each letter from the top, three bits each, in octal.
_FONT: Final = {
    "0": "75557", "1": "26227", "2": "71747", "3": "71717", "4": "55711", "5": "74717",
    "6": "74757", "7": "71122", "8": "75757", "9": "75717", "a": "25755", "b": "65656",
    "c": "34443", "d": "65556", "e": "74647", "f": "74644", "g": "34553", "h": "55755",
    "i": "72227", "j": "11152", "k": "55655", "l": "44447", "m": "57755", "n": "65555",
    "o": "25552", "p": "65644", "q": "25563", "r": "65655", "s": "34216", "t": "72222",
    "u": "55557", "v": "55552", "w": "55775", "x": "55255", "y": "55222", "z": "71247",
    ".": "00002", ",": "00024", ":": "02020", "-": "00700", "+": "02720", "(": "12221",
    ")": "42224", "/": "11244", "%": "51245", "_": "00007", "*": "05250", "=": "07070",
}  # fmt: skip


def encode(scene: Scene, suffix: str) -> bytes:
    """The scene in the format of a file name's ending, ``.svg`` or ``.png``.

    Raises
    ------
    RetentionError
        ``bad-plot`` for any other ending.
    """
    match suffix.lower():
        case ".svg":
            return to_svg(scene).encode()
        case ".png":
            return to_png(scene)
    raise RetentionError("bad-plot", repr(suffix), "need a file that ends in .svg or .png")


def to_png(scene: Scene) -> bytes:
    """The scene as an 8-bit RGB PNG."""
    pixels_YXC = np.full((scene.height, scene.width, 3), 255, dtype=np.uint8)
    for box in scene.boxes:
        area = pixels_YXC[box.y : box.y + box.height, box.x : box.x + box.width]
        mixed = area + (np.asarray(box.color) - area.astype(np.float64)) * box.strength
        area[:] = np.rint(mixed).astype(np.uint8)
    for label in scene.labels:
        _write(pixels_YXC, label)
    rows = np.zeros((scene.height, 1 + 3 * scene.width), dtype=np.uint8)  # filter type 0
    rows[:, 1:] = pixels_YXC.reshape(scene.height, -1)
    header = struct.pack(">IIBBBBB", scene.width, scene.height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _write(pixels_YXC: npt.NDArray[np.uint8], label: Label) -> None:
    x = label.x - ADVANCE * len(label.text) if label.is_right else label.x
    top = label.y - 5 * SCALE
    for letter in label.text.lower():
        for row, bits in enumerate(_FONT.get(letter, "00000")):
            for column in range(3):
                if int(bits, 8) >> (2 - column) & 1:
                    left = x + column * SCALE
                    y = top + row * SCALE
                    pixels_YXC[y : y + SCALE, left : left + SCALE] = INK
        x += ADVANCE
