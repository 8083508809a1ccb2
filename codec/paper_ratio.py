"""What a code's ratio comes to for a whole cache: the KVTC paper's count, and ours.

A cache of ``n`` tokens is ``s`` sink tokens, ``w`` last tokens kept as they are, and the
rest, coded at ``cr`` times.  Counted in tokens of 16-bit elements,

    n / ((n - w - s) / cr + w + s * sink_bits / 16)

The paper counts sinks as if they were FP8 (``sink_bits=8``); here they are stored bit for
bit in the engine's dtype (16).  Its own "CR" leaves the window out: ``window_tokens=0``.
No basis is in any of these, which is held once per worker.

Source: KVTC (arXiv 2511.01815v2) section 4, B.3 and B.15.
"""

from __future__ import annotations

PAPER_WINDOW_TOKENS = 128
"""Last tokens of a cache that the paper never codes."""
PAPER_SINK_TOKENS = 4
"""First tokens of a cache that the paper never codes."""
PAPER_SINK_BITS = 8
"""Bits per element of a sink token as the paper counts it."""
RAW_BITS = 16
"""Bits per element of a cache that is not compressed, whatever the engine computes in."""


def whole_cache_ratio(
    num_tokens: int,
    coded_ratio: float,
    *,
    window_tokens: int = PAPER_WINDOW_TOKENS,
    sink_tokens: int = PAPER_SINK_TOKENS,
    sink_bits: int = PAPER_SINK_BITS,
) -> float:
    """Raw bytes over stored bytes of ``num_tokens``, sinks and window included.

    Parameters
    ----------
    coded_ratio
        Ratio of the coded tokens alone, entropy stage included; at least 1.
    window_tokens, sink_tokens
        Tokens that are not coded, at either end.
    sink_bits
        Bits per element that a sink is counted at: 8 in the paper, 16 in our blobs.

    Raises
    ------
    ValueError
        If the cache is shorter than its uncoded tokens, or a number is out of range.

    Examples
    --------
    >>> [round(whole_cache_ratio(n, 20), 1) for n in (512, 4096, 131072)]
    [3.4, 12.5, 19.6]
    """
    if not coded_ratio >= 1:
        raise ValueError(f"coded_ratio must be at least 1, got {coded_ratio}")
    if min(window_tokens, sink_tokens) < 0 or not 0 < sink_bits <= RAW_BITS:
        raise ValueError(
            f"need no negative count and 1..{RAW_BITS} sink_bits, "
            f"got {window_tokens, sink_tokens, sink_bits}"
        )
    uncoded_tokens = window_tokens + sink_tokens
    if num_tokens < max(uncoded_tokens, 1):
        raise ValueError(f"need at least {max(uncoded_tokens, 1)} tokens, got {num_tokens}")
    sinks_as_tokens = sink_tokens * sink_bits / RAW_BITS
    coded_as_tokens = (num_tokens - uncoded_tokens) / coded_ratio
    return num_tokens / (coded_as_tokens + window_tokens + sinks_as_tokens)
