"""Reading and writing the fields of a frame's body, every length bounded before use.

Integers are little-endian and unsigned.  Text and byte strings carry a two-byte length.
The encoding of a value is the only one its reader accepts, so that two different byte
strings never mean the same body.
"""

from __future__ import annotations

_LENGTH_BYTES = 2


def need_uint(name: str, value: int, num_bytes: int) -> None:
    """Raise ``ValueError`` unless ``value`` fits in ``num_bytes`` unsigned bytes."""
    if not 0 <= value < 1 << 8 * num_bytes:
        raise ValueError(f"need 0 <= {name} < 2**{8 * num_bytes}, got {value}")


def need_exact(name: str, value: bytes, num_bytes: int) -> None:
    """Raise ``ValueError`` unless ``value`` is ``num_bytes`` long."""
    if len(value) != num_bytes:
        raise ValueError(f"{name} must be {num_bytes} bytes, got {len(value)}")


def need_text(name: str, value: str, *, most: int, least: int = 1) -> None:
    """Raise ``ValueError`` unless ``value`` is ``least`` to ``most`` bytes of UTF-8."""
    if not least <= len(value.encode()) <= most:
        raise ValueError(f"{name} must be {least} to {most} bytes, got {len(value.encode())}")


def pack_uint(value: int, num_bytes: int) -> bytes:
    """Little-endian form of an integer that `need_uint` has let pass."""
    return value.to_bytes(num_bytes, "little")


def pack_bytes(value: bytes) -> bytes:
    """Length and bytes."""
    return pack_uint(len(value), _LENGTH_BYTES) + value


def pack_text(value: str) -> bytes:
    """Length and UTF-8."""
    return pack_bytes(value.encode())


class FieldReader:
    """Takes fields off the front of a body; refuses to read past its end.

    Every refusal is a ``ValueError``, which the frame parser turns into a
    `ProtocolError` with the peer's name.
    """

    def __init__(self, body: bytes | bytearray | memoryview) -> None:
        self._body = memoryview(body)
        #: Bytes taken so far, at most ``len(_body)``.
        self._taken = 0

    def exact(self, num_bytes: int) -> bytes:
        """Take ``num_bytes`` bytes."""
        stop = self._taken + num_bytes
        if stop > len(self._body):
            raise ValueError(f"body ends {stop - len(self._body)} bytes too early")
        taken = bytes(self._body[self._taken : stop])
        self._taken = stop
        return taken

    def uint(self, num_bytes: int) -> int:
        """Take an unsigned integer."""
        return int.from_bytes(self.exact(num_bytes), "little")

    def bytes(self, *, most: int) -> bytes:
        """Take a byte string; a length over ``most`` is refused before anything is copied."""
        length = self.uint(_LENGTH_BYTES)
        if length > most:
            raise ValueError(f"byte string of {length} bytes, at most {most} are allowed")
        return self.exact(length)

    def text(self, *, most: int) -> str:
        """Take UTF-8 text; ``UnicodeDecodeError`` is a ``ValueError`` too."""
        return self.bytes(most=most).decode()

    def flag(self) -> bool:
        """Take a boolean, which is 0 or 1 and nothing else."""
        value = self.uint(1)
        if value > 1:
            raise ValueError(f"a flag must be 0 or 1, got {value}")
        return value == 1

    def finish(self) -> None:
        """Raise ``ValueError`` unless everything was taken."""
        if self._taken != len(self._body):
            raise ValueError(f"{len(self._body) - self._taken} trailing bytes")
