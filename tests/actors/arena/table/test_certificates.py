"""The certificate log: lines as the format has them, whole or not at all."""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.arena.table.certificates import CertificateLog, describe_classes
from actors.arena.table.journal import Journal
from codec.errors import CertificateError
from policies.certificates import verify
from policies.retention.digest import plan_digest
from policies.retention.plan import Plan, compile_program
from policies.retention.program import AttentionState, CrossState, Program, RecurrentState
from policies.retention.text import parse_relation
from tests.suites.certificate_logs import CLASSES, chained, everything
from tests.suites.quiet import QUIET

ARENA = "0123456789abcdef" * 2


def attention(name: str, layer: int, reads: str) -> AttentionState:
    """State of one layer."""
    relation = parse_relation(reads)
    return AttentionState(name=name, layers=(layer,), reads=relation, bytes_per_token_layer=8)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """The plan whose classes the sample log is about."""
    states = (
        attention("full", 0, "true"),
        attention("window", 1, "q - k < 6"),
        RecurrentState(name="state", layers=(2,), bytes_per_layer=64),
        CrossState(name="encoder", layers=(3,), bytes_per_token_layer=8, source_tokens=8),
    )
    return compile_program(Program(page_tokens=4, states=states))


class Disk:
    """A file that takes some bytes and then is full, until it is emptied."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.data = bytearray()
        self.may_truncate = True

    def flush(self) -> None:
        """There is no buffer."""

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """It is only ever appended to."""
        return len(self.data) if whence == io.SEEK_END else offset

    def write(self, data: memoryview) -> int:
        """As much as there is room for, as a raw file does it."""
        taken = bytes(data[: self.room - len(self.data)])
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.data += taken
        return len(taken)

    def truncate(self, size: int) -> int:
        """Cut what is too much."""
        if not self.may_truncate:
            raise OSError(errno.EIO, "Input/output error")
        del self.data[size:]
        return size


def test_every_event_is_written_as_the_format_has_it(plan: Plan) -> None:
    """Byte for byte what the tests build on their own, and it holds."""
    lines: list[bytes] = []
    log = CertificateLog(lines.append, ARENA)

    log.begin(plan, 1)
    for event in everything()[1:]:
        log.write([event])

    events = everything()
    events[0][1]["plan"] = plan_digest(plan).hex()
    assert lines == chained(events)
    report = verify(lines)
    assert report.is_at_rest
    assert (log.num_lines, log.digest) == (report.num_lines, report.digest)
    assert report.arena == ARENA


def test_a_log_is_a_journal(plan: Plan) -> None:
    """So a table that keeps none writes to the journal that goes nowhere."""
    assert issubclass(CertificateLog, Journal)
    Journal().begin(plan, 1)
    Journal().write(everything())


def test_a_new_log_names_a_new_arena(plan: Plan) -> None:
    """Two logs cannot be taken for one."""
    lines: list[bytes] = []
    first, second = CertificateLog(lines.append), CertificateLog(lines.append)

    first.begin(plan, 3)

    assert first.arena != second.arena
    assert UUID(hex=first.arena).hex == verify(lines).arena
    assert verify(lines).epoch == 3


def test_the_events_of_a_call_are_one_write() -> None:
    """In their order; and none at all is no write."""
    writes: list[bytes] = []
    log = CertificateLog(writes.append, ARENA)

    log.write(everything()[:5])
    log.write([])
    log.write(iter(everything()[5:7]))

    assert len(writes) == 2
    assert b"".join(writes) == b"".join(chained(everything()[:7]))


def test_classes_are_described_as_data(plan: Plan) -> None:
    """Claims and pages, and what tells state and an encoder's output apart."""
    assert describe_classes(plan) == CLASSES


@pytest.mark.parametrize(
    ("reads", "rules"),
    [
        ("q // 8 == k // 8", [{"step": 8, "slope": 8, "offset": 7, "shift": 0}]),
        ("q - k < 8 or k < 4", ["forever", {"step": 1, "slope": 1, "offset": 7, "shift": 0}]),
    ],
)
def test_rules_are_described_as_data(reads: str, rules: list[Any]) -> None:
    """Those with a last reader by its terms, the others by name."""
    plan = compile_program(Program(page_tokens=4, states=(attention("some", 0, reads),)))

    found = describe_classes(plan)

    assert [c["rule"] for row in found for c in row["claims"]] == rules
    assert json.loads(json.dumps(found)) == found


def test_keys_are_described_as_data() -> None:
    """Every fourth key is kept for ever, and its pages count members."""
    reads = parse_relation("q - k < 8 or k % 4 == 0")
    state = AttentionState(name="some", layers=(0,), reads=reads, bytes_per_token_layer=8)

    ranked = next(
        row
        for row in describe_classes(compile_program(Program(page_tokens=4, states=(state,))))
        if row["ranked"]
    )

    assert [(c["modulus"], c["residues"]) for c in ranked["claims"]] == [(4, [0])]


@pytest.mark.parametrize("buffering", [0, -1])
def test_a_file_has_each_line_when_the_call_returns(tmp_path: Path, buffering: int) -> None:
    """Whatever buffer it was opened with."""
    path = tmp_path / "log"
    with path.open("ab", buffering=buffering) as file:
        log = CertificateLog(file, ARENA)
        for number, event in enumerate(everything()[:6], 1):
            log.write([event])

            assert path.read_bytes() == b"".join(chained(everything()[:number]))


def test_a_log_begins_its_file(tmp_path: Path) -> None:
    """Two logs in one file would be none; what is there stays as it is."""
    path = tmp_path / "log"
    path.write_bytes(b"something")

    with path.open("ab") as file, pytest.raises(ValueError, match="empty file"):
        CertificateLog(file)

    assert path.read_bytes() == b"something"


@QUIET
@given(st.integers(0, 15_000), st.integers(1, 5))
def test_a_full_disk_leaves_whole_lines(room: int, batch: int) -> None:
    """Of a batch that does not fit there is nothing; with room, the log goes on."""
    disk = Disk(room)
    log = CertificateLog(disk, ARENA)  # type: ignore[arg-type]
    events, lines = everything(), chained(everything())
    for first in range(0, len(events), batch):
        wanted = events[first : first + batch]
        before = bytes(disk.data)
        if len(b"".join(lines[: first + batch])) > disk.room:
            with pytest.raises(CertificateError, match="No space left") as caught:
                log.write(wanted)
            assert caught.value.line == first + 1
            assert isinstance(caught.value.__cause__, OSError)
            assert (bytes(disk.data), log.num_lines) == (before, first)
            disk.room = 2**20
        log.write(wanted)

    assert bytes(disk.data) == b"".join(lines)


def test_a_torn_line_that_stays_ends_the_log() -> None:
    """Nothing is ever written behind it, even if there is room again: fail closed."""
    disk = Disk(room=1000)
    disk.may_truncate = False
    log = CertificateLog(disk, ARENA)  # type: ignore[arg-type]
    log.write(everything()[:1])
    with pytest.raises(CertificateError, match="No space left"):
        log.write(everything()[1:6])
    torn = bytes(disk.data)
    disk.room, disk.may_truncate = 2**20, True

    with pytest.raises(CertificateError, match="torn"):
        log.write(everything()[1:2])

    assert bytes(disk.data) == torn
    assert log.num_lines == 1
    assert torn.startswith(chained(everything())[0])


def test_a_file_that_takes_nothing_is_refused() -> None:
    """A write of no bytes would otherwise be tried for ever."""
    disk = Disk(room=2**20)
    disk.write = lambda _: 0  # type: ignore[method-assign]

    with pytest.raises(CertificateError, match="takes no more"):
        CertificateLog(disk, ARENA).write(everything()[:1])  # type: ignore[arg-type]


def test_an_interrupted_write_leaves_whole_lines() -> None:
    """What ends a write need not be an error of the file."""
    disk = Disk(room=2**20)
    log = CertificateLog(disk, ARENA)  # type: ignore[arg-type]
    log.write(everything()[:1])
    whole, write = bytes(disk.data), disk.write

    def write_and_stop(data: memoryview) -> int:
        write(data[:10])
        raise KeyboardInterrupt

    disk.write = write_and_stop  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        log.write(everything()[1:2])

    assert bytes(disk.data) == whole


def _closed(tmp_path: Path) -> Callable[[bytes], object]:
    file = (tmp_path / "log").open("ab", buffering=0)
    file.close()
    return file.write


def test_a_closed_file_is_a_failed_sink(tmp_path: Path) -> None:
    """The same error as of a full disk, and the log stays where it is."""
    log = CertificateLog(_closed(tmp_path), ARENA)

    with pytest.raises(CertificateError, match="could not be written"):
        log.write(everything()[:1])

    assert (log.num_lines, log.digest) == (0, "0" * 64)
