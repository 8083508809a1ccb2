"""Chunk keys: a prompt's whole chunks, each named by its tokens and all before them.

1. Token ids become little-endian u32, chunk by chunk; a last partial chunk has no key.
2. ``key[i] = digest(DOMAIN, parent, tokens of chunk i, extra keys)``, where the parent is
   ``key[i - 1]`` and, for the first chunk, the namespace digest.
3. Extra keys (an image's digest, say) enter at the first chunk only: they reach every
   later key through the chain.

Two prompts share a key only if they share the namespace, the extra keys and every
token up to the chunk's end.  Python's ``hash`` has no part in it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from codec.identity import DIGEST_BYTES, ChunkKey, Digest, digest

DOMAIN = "kvfabric.chunk.1"
TOKEN_BYTES = 4
MAX_TOKEN_ID = 2**32 - 1


def chunk_keys(
    namespace: Digest, tokens: Sequence[int], *, tokens_per_chunk: int, extra: bytes = b""
) -> list[ChunkKey]:
    """Name every whole chunk of ``tokens``; linear in the number of tokens.

    Parameters
    ----------
    namespace
        What the KV is: `Namespace.digest`.
    tokens
        Ids from the prompt's first token on; also those of the last partial chunk are checked.
    tokens_per_chunk
        At least 1, and the same wherever keys are to be compared.
    extra
        Whatever else the KV depends on that the tokens do not say.

    Returns
    -------
    keys
        ``len(tokens) // tokens_per_chunk`` of them.  Keys of a longer prompt begin with
        the keys of its prefixes.

    Raises
    ------
    ValueError
        If a token id is not a u32, ``namespace`` is not 16 bytes, or there is no token in
        a chunk.

    Examples
    --------
    >>> short = chunk_keys(digest("demo"), [7, 8, 9], tokens_per_chunk=2)
    >>> long = chunk_keys(digest("demo"), [7, 8, 9, 10], tokens_per_chunk=2)
    >>> len(short), len(long), long[0] == short[0]
    (1, 2, True)
    """
    if len(namespace) != DIGEST_BYTES:
        raise ValueError(f"namespace must be {DIGEST_BYTES} bytes, got {len(namespace)}")
    if tokens_per_chunk < 1:
        raise ValueError(f"tokens_per_chunk must be at least 1, got {tokens_per_chunk}")
    packed = pack_tokens(tokens)
    chunk_bytes = tokens_per_chunk * TOKEN_BYTES
    keys: list[ChunkKey] = []
    parent, extra_here = bytes(namespace), extra
    for start in range(0, len(packed) - chunk_bytes + 1, chunk_bytes):
        parent = digest(DOMAIN, parent, packed[start : start + chunk_bytes], extra_here)
        keys.append(ChunkKey(parent))
        extra_here = b""
    return keys


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian u32.

    Raises
    ------
    ValueError
        If an id is negative, over ``MAX_TOKEN_ID`` or not an integer.
    """
    try:
        return struct.pack(f"<{len(tokens)}I", *tokens)
    except struct.error:
        at, token = next((i, t) for i, t in enumerate(tokens) if not _is_u32(t))
        raise ValueError(
            f"a token id must be an integer in 0..{MAX_TOKEN_ID}, got {token!r} at {at}"
        ) from None


def _is_u32(token: object) -> bool:
    """Whether ``struct`` takes ``token``: the same question asked of one id."""
    try:
        struct.pack("<I", token)
    except struct.error:
        return False
    return True
