"""The header of a blob: what it holds and how it was coded, and its bytes.

The bytes are one msgpack array of, in order: namespace, codec, chunk key (16 bytes
each), layer start and stop, head start and stop, retention class, start position,
number of tokens, first token, last token, dtype, layers, heads, key head dim, value
head dim.  Every header has one written form: bytes that parse to the same fields but
are not that form (a longer integer, say) are refused, as is any field of another type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from codec.errors import CorruptBlobError
from codec.geometry import Stage
from codec.identity import DIGEST_BYTES, ChunkKey, ComponentKey

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""What a blob may decode to, and the size of one element of it."""

MAX_HEADER_BYTES = 1 << 16
MAX_NAME_CHARS = 64
MAX_TOKENS = 1 << 20
"""Most tokens in one component; a chunk has 256 unless configured otherwise."""
MAX_POSITION = 1 << 31
"""One past the last absolute position that a chunk may reach."""
MAX_EXTENT = 1 << 16
"""Most layers or heads of a model, and the widest head."""
SLACK_BYTES = 1 << 20
"""What side information may add to a component of hardly any elements."""

_MAX_U32 = (1 << 32) - 1
_NAME = re.compile(rf"[!-~]{{1,{MAX_NAME_CHARS}}}", re.ASCII)
_NUM_FIELDS = 17


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobHeader:
    """What a blob holds and how it was coded; one that exists is within every bound."""

    namespace: bytes
    """Digest of the `codec.identity.Namespace`, 16 bytes."""

    codec: bytes
    """`codec.identity.CodecId` of the codec that wrote it, 16 bytes."""

    component: ComponentKey
    start_position: int
    """Absolute position of the chunk's first token."""

    num_tokens: int
    first_token: int
    """Repeated here, as is the last, so that a digest collision is a miss."""

    last_token: int
    dtype: str
    """What decoding returns: a key of `DTYPE_BYTES`."""

    num_layers: int
    """Of the component's stage, as are the heads."""

    num_heads: int
    key_head_dim: int
    value_head_dim: int

    def __post_init__(self) -> None:
        stage = self.component.stage
        check_digest("namespace", self.namespace)
        check_digest("codec", self.codec)
        check_digest("chunk_key", self.component.chunk_key)
        check_name("retention_class", self.component.retention_class)
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")
        check_int("layer_start", stage.layer_start, 0, MAX_EXTENT)
        check_int("layer_stop", stage.layer_stop, 1, MAX_EXTENT)
        check_int("head_start", stage.head_start, 0, MAX_EXTENT)
        check_int("head_stop", stage.head_stop, 1, MAX_EXTENT)
        check_int("num_tokens", self.num_tokens, 1, MAX_TOKENS)
        check_int("start_position", self.start_position, 0, MAX_POSITION - self.num_tokens)
        check_int("first_token", self.first_token, 0, _MAX_U32)
        check_int("last_token", self.last_token, 0, _MAX_U32)
        check_int("num_layers", self.num_layers, stage.num_layers, stage.num_layers)
        check_int("num_heads", self.num_heads, stage.num_heads, stage.num_heads)
        check_int("key_head_dim", self.key_head_dim, 1, MAX_EXTENT)
        check_int("value_head_dim", self.value_head_dim, 1, MAX_EXTENT)
        if self.num_tokens == 1 and self.first_token != self.last_token:
            found = (self.first_token, self.last_token)
            raise ValueError(f"the first of 1 token is the last, got {found}")

    @property
    def num_elements(self) -> int:
        """Elements of the component's keys and values together."""
        per_head = self.key_head_dim + self.value_head_dim
        return self.num_tokens * self.num_layers * self.num_heads * per_head

    @property
    def decoded_bytes_bound(self) -> int:
        """Most bytes that all sections may decode to, unless a reader says otherwise.

        Four bytes per element, since a raw float32 component is the largest that we
        write, and `SLACK_BYTES` for the tables of very small components.
        """
        return self.num_elements * 4 + SLACK_BYTES


def pack_header(header: BlobHeader) -> bytes:
    """Write ``header`` in its one form."""
    component, stage = header.component, header.component.stage
    fields = (
        header.namespace,
        header.codec,
        component.chunk_key,
        *(stage.layer_start, stage.layer_stop, stage.head_start, stage.head_stop),
        component.retention_class,
        *(header.start_position, header.num_tokens, header.first_token, header.last_token),
        header.dtype,
        *(header.num_layers, header.num_heads, header.key_head_dim, header.value_head_dim),
    )
    return bytes(msgpack.packb(fields))


def unpack_header(view: memoryview) -> BlobHeader:
    """Read what `pack_header` wrote.

    Raises
    ------
    CorruptBlobError
        If ``view`` is anything else.
    """
    fields = _unpack_fields(view)
    namespace, codec, chunk_key, *stage, retention_class = fields[:8]
    position, num_tokens, first, last, dtype, num_layers, num_heads, key_dim, value_dim = fields[8:]
    try:
        header = BlobHeader(
            namespace=namespace,
            codec=codec,
            component=ComponentKey(ChunkKey(chunk_key), Stage(*stage), retention_class),
            start_position=position,
            num_tokens=num_tokens,
            first_token=first,
            last_token=last,
            dtype=dtype,
            num_layers=num_layers,
            num_heads=num_heads,
            key_head_dim=key_dim,
            value_head_dim=value_dim,
        )
    # TypeError: a stage compares its bounds, and a dtype is looked up, whatever they are.
    except (ValueError, TypeError) as error:
        raise CorruptBlobError("header", str(error)) from None
    if pack_header(header) != view:
        raise CorruptBlobError("header", "is not in its one written form")
    return header


def check_name(what: str, text: object) -> None:
    """Refuse anything but 1..64 printable ASCII characters without spaces.

    Raises
    ------
    ValueError
        Naming ``what`` it was to be.
    """
    if type(text) is not str or not _NAME.fullmatch(text):
        raise ValueError(f"{what} must be 1..{MAX_NAME_CHARS} printable ASCII, got {text!r}")


def check_int(what: str, value: object, least: int, most: int) -> None:
    """Refuse anything but an integer in ``least..most``, both included.

    Raises
    ------
    ValueError
        Naming ``what`` it was to be.
    """
    # Exactly int: True would pass as 1, and be written otherwise.
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{what} must be an integer in {least}..{most}, got {value!r}")


def check_digest(what: str, value: object) -> None:
    """Refuse anything but 16 bytes.

    Raises
    ------
    ValueError
        Naming ``what`` it was to be.
    """
    if type(value) is not bytes or len(value) != DIGEST_BYTES:
        raise ValueError(f"{what} must be {DIGEST_BYTES} bytes, got {value!r}")


def _unpack_fields(view: memoryview) -> list[Any]:
    """The header's array; nothing in it is longer than the longest legal field."""
    try:
        fields = msgpack.unpackb(
            view,
            max_array_len=_NUM_FIELDS,
            max_str_len=MAX_NAME_CHARS,
            max_bin_len=DIGEST_BYTES,
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise CorruptBlobError("header", f"is not msgpack: {error}") from None
    if type(fields) is not list or len(fields) != _NUM_FIELDS:
        raise CorruptBlobError("header", f"is not an array of {_NUM_FIELDS} fields")
    return fields
