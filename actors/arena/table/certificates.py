"""The certificate log: what a page table does, written down before it does it.

One line of JSON per event, numbered, and chained by the SHA-256 of the line before, so that
no line can be changed, dropped or moved without all behind it.  `policies.certificates`
reads it back and checks, without knowing this code, that every slot was used again only when
nothing had it any more.

Events of one call are written in one go.  If the sink fails, the log is as before, down to
its last whole line, and the caller gets an error: what is not written must not happen, so a
full disk stops the reuse of memory and not its proof.

Nothing is forced to the device here; a machine that loses power may lose the last lines.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO
from uuid import uuid4

from actors.arena.table.journal import Event, Journal
from codec.errors import CertificateError
from policies.retention.claims import Claim, Forever, Unread
from policies.retention.digest import plan_digest
from policies.retention.plan import Plan, PlannedClass

FORMAT = "kvfabric-certificates/1"

Sink = BinaryIO | Callable[[bytes], object]


class CertificateLog(Journal):
    """Writes events to a sink, one line each.  Not thread-safe: its caller takes turns.

    Parameters
    ----------
    sink
        An empty file, opened for appending in binary mode; or something that takes all of
        the bytes it is given, or raises and takes none.
    arena
        Name of the arena, 32 hexadecimal digits; a new one if nothing.
    """

    def __init__(self, sink: Sink, arena: str | None = None) -> None:
        self.arena = arena or uuid4().hex
        self._sink = sink if callable(sink) else _Appender(sink).append
        #: Lines in the sink, all of them whole.
        self.num_lines = 0
        #: SHA-256 of the last of them, in hexadecimal digits.
        self.digest = "0" * 64

    def write(self, events: Iterable[Event]) -> None:
        """Write events, in this order and in one go.

        Raises
        ------
        CertificateError
            If the sink failed: none of them is in the log, and none may happen.
        """
        lines: list[bytes] = []
        digest = self.digest
        for number, (event, fields) in enumerate(events, self.num_lines):
            line = _line({**fields, "event": event, "n": number, "prev": digest})
            digest = hashlib.sha256(line).hexdigest()
            lines.append(line + b"\n")
        if not lines:
            return
        try:
            self._sink(b"".join(lines))
        except (OSError, ValueError) as error:  # the latter of a file that is closed
            why = f"it could not be written: {error}"
            raise CertificateError(self.num_lines + 1, why) from error
        self.num_lines += len(lines)
        self.digest = digest

    def begin(self, plan: Plan, epoch: int) -> None:
        """The log is about the slots of ``plan``; its first line."""
        fields = {
            "format": FORMAT,
            "arena": self.arena,
            "epoch": epoch,
            "plan": plan_digest(plan).hex(),
            "classes": describe_classes(plan),
        }
        self.write([("begin", fields)])


def describe_classes(plan: Plan) -> list[dict[str, Any]]:
    """The classes of a plan with their claims, as the log's first line has them.

    Recurrent state is the one page 0, which every step replaces, in place or by a copy, and
    which is never dead before.  An encoder's output is pages ``0 .. stop_page - 1``, dead only
    when the request is released.
    """
    return [_describe(found) for found in plan.classes]


def _describe(found: PlannedClass) -> dict[str, Any]:
    return {
        "name": found.name,
        "kind": found.kind,
        "page_tokens": found.page_tokens,
        "first_page": found.region.first_page,
        "stop_page": 1 if found.kind == "recurrent" else found.region.stop_page,
        "ranked": found.region.is_ranked,
        "claims": [_describe_claim(claim) for claim in found.region.claims],
    }


def _describe_claim(claim: Claim) -> dict[str, Any]:
    keys, rule = claim.keys, claim.rule
    described: str | dict[str, int]
    if isinstance(rule, Forever):
        described = "forever"
    elif isinstance(rule, Unread):
        described = "unread"
    else:
        described = {name: getattr(rule, name) for name in ("step", "slope", "offset", "shift")}
    return {
        "start": keys.start,
        "stop": keys.stop,
        "modulus": keys.modulus,
        "residues": list(keys.residues),
        "rule": described,
    }


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode("ascii")


class _Appender:
    """Appends to a file whole, or not at all.

    It goes around the file's buffer: what a full disk leaves in one cannot be taken back.
    """

    def __init__(self, file: BinaryIO) -> None:
        file.flush()
        raw = getattr(file, "raw", file)
        self._file: BinaryIO = raw
        #: Bytes of whole lines.
        self._num_bytes = 0
        #: Whether a torn line could not be taken back; it stays so.
        self._is_torn = False
        if raw.seek(0, io.SEEK_END):
            raise ValueError("need an empty file: a log begins with its first line")

    def append(self, data: bytes) -> None:
        """Append all of ``data``.

        Raises
        ------
        OSError
            If that failed; the file is as before, or else nothing is ever appended again.
        """
        if self._is_torn:
            raise OSError("its last line is torn and could not be taken back")
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._write_some(rest) :]
        except BaseException:
            self._take_back()
            raise
        self._num_bytes += len(data)

    def _write_some(self, rest: memoryview) -> int:
        num_bytes = self._file.write(rest)
        if not num_bytes:
            raise OSError("the file takes no more bytes")
        return num_bytes

    def _take_back(self) -> None:
        try:
            self._file.truncate(self._num_bytes)
            self._file.seek(self._num_bytes)
        except (OSError, ValueError):
            self._is_torn = True
