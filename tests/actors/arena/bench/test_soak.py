"""A short soak: nothing is ever out of the books, and nothing is left."""

from __future__ import annotations

from dataclasses import replace

from actors.arena.bench.soak import CHECK_EVERY, soak
from actors.arena.driver import Physical
from actors.arena.driver_host import HostVmmDriver
from actors.arena.table.certificates import CertificateLog
from policies.certificates import verify

GRANULE = 65536


class BadCount(HostVmmDriver):
    """Measures one byte too much, now and then."""

    num_looks = 0

    def physical(self) -> Physical:
        """See `Driver.physical`."""
        found = super().physical()
        self.num_looks += 1
        wrong = self.num_looks % 100 == 0
        return replace(found, measured_bytes=found.measured_bytes + 1) if wrong else found


def test_a_soak_ends_with_nothing_held_and_every_reuse_certified() -> None:
    """Its log holds, and certifies as many pages as it says."""
    driver = HostVmmDriver(512 * GRANULE, GRANULE)
    lines: list[bytes] = []
    log = CertificateLog(lambda data: lines.extend(data.splitlines(keepends=True)))
    told: list[int] = []

    found = soak(driver, num_ops=2 * CHECK_EVERY, seed=1, journal=log, progress=told.append)

    assert (found.num_mismatches, found.final_bytes) == (0, 0)
    assert told == [CHECK_EVERY, 2 * CHECK_EVERY]
    assert sum(found.ops.values()) == found.num_ops == 2 * CHECK_EVERY
    assert set(found.ops) == {"step", "open", "fork", "release", "put", "drop", "tidy"}
    report = verify(lines)
    assert report.is_at_rest
    assert report.num_certified == found.num_certified > 100
    driver.close()


def test_a_driver_that_miscounts_is_noticed() -> None:
    """The comparison is made after every operation."""
    driver = BadCount(512 * GRANULE, GRANULE)

    found = soak(driver, num_ops=300, seed=1)

    assert found.num_mismatches == 3
    driver.close()
