"""Damaged blobs of every codec: a seeded share of the large run of `tests.suites.mutations`."""

from __future__ import annotations

import pytest

from tests.suites import mutations

#: Mutants per seed; the large run is ``python -m tests.suites.mutations --count 100000``.
COUNT = 1500


@pytest.mark.parametrize("seed", [1, 2])
def test_no_mutant_decodes_crashes_or_allocates_without_bound(seed: int) -> None:
    """Plain damage is a miss; lies under right checksums are a miss or tensors of their shape."""
    outcome = mutations.run(COUNT, seed)

    assert outcome.faults == []
    assert sum(outcome.counts.values()) == COUNT
    # Both the checksums and what lies behind them were reached.
    assert outcome.counts["plain: CorruptBlobError"] > COUNT / 3
    assert outcome.counts["sealed: CorruptBlobError"] > COUNT / 5
    assert outcome.counts["sealed: decoded"] > COUNT / 50
    assert outcome.counts["plain: decoded"] == 0


def test_equal_seeds_give_equal_mutants() -> None:
    """A fault can be looked at again."""
    first, again, other = (mutations.run(200, seed) for seed in (3, 3, 4))

    assert first.counts == again.counts
    assert first.counts != other.counts


@pytest.mark.parametrize("sealed", [False, True])
def test_a_decoder_that_believes_anything_is_found_out(sealed: bool) -> None:
    """The judge can fail: wrong shapes, numbers and errors are all noted."""
    made = mutations.subjects()["entropy 16"]

    class Believer:
        """Decodes everything to one tensor, or stumbles."""

        is_lossless = False

        def decode(self, buf: bytes) -> object:
            """Not a number, of no shape."""
            tensor = made.codec.decode(made.blob)[0].clone()
            tensor[0] = float("nan")
            return tensor[:5], {}[len(buf)] if len(buf) < 100 else tensor

    subject = mutations.Subject(Believer(), made.blob, made.other)
    outcome = mutations.Outcome()
    mutations.judge(subject, made.blob, outcome, sealed=sealed, cut=False)
    mutations.judge(subject, b"", outcome, sealed=sealed, cut=False)

    text = "\n".join(outcome.faults)
    assert "raised KeyError" in text
    assert "decoded to shape" in text
    assert "not finite" in text
    assert ("plain damage was decoded" in text) is not sealed
