"""A process that borrows memory, run as a script by the tests of `actors.arena.sharing`.

It answers each line on its standard input with one on its standard output.  Arguments: the
path of the socket, the kind of driver, and for ``cuda`` the path of the stand-in.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

from actors.arena.driver import Access, Driver, Share, Span
from actors.arena.driver_cuda import CudaVmmDriver
from actors.arena.driver_host import HostVmmDriver
from actors.arena.sharing import GenerationPage, borrow
from codec.errors import VmmError
from tests.fakes.cuda_fake import bind

GRANULE = 1 << 16
TIMEOUT_S = 60.0


def make_driver(kind: str) -> Driver:
    """A driver with room for a granule of its own."""
    if kind == "host":
        return HostVmmDriver(GRANULE, GRANULE)
    return CudaVmmDriver(0, capacity_bytes=GRANULE)


class Borrower:
    """What the process can be told to do; each returns a line."""

    def __init__(self, path: str, kind: str, *fake_path: str) -> None:
        if fake_path:
            bind(Path(*fake_path)).size(GRANULE)
        self.kind = kind
        self.driver = make_driver(kind)
        self.path = path
        self.connections: list[socket.socket] = []
        self.va = 0
        self.nbytes = 0
        self.page: GenerationPage | None = None

    def receive(self) -> Share:
        """Connect, and take what is lent."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.path)
        self.connections.append(connection)
        return borrow(connection, TIMEOUT_S)

    def take(self, access: str) -> str:
        """Map what is lent, with that access; its identity."""
        share = self.receive()
        handle = self.driver.import_(share)
        share.close()
        self.nbytes = share.nbytes
        self.va = self.driver.reserve(share.nbytes)
        self.driver.map(self.va, handle)
        self.open(access)
        return share.identity

    def take_page(self) -> str:
        """Open the page of generations that is lent."""
        share = self.receive()
        self.page = GenerationPage.open(share)
        share.close()
        return str(self.page.num_names)

    def open(self, access: str) -> str:
        """Change the access."""
        self.driver.set_access([Span(self.va, self.nbytes)], Access(access))
        return access

    def read(self, num_bytes: str) -> str:
        """The first bytes."""
        return self.driver.copy_out(self.va, int(num_bytes)).decode()

    def write(self, text: str) -> str:
        """Overwrite the first bytes."""
        self.driver.copy_in(self.va, text.encode())
        return text

    def generation(self, name: str) -> str:
        """One number of the page."""
        assert self.page is not None
        return str(self.page.generation(int(name)))

    def physical(self) -> str:
        """Bytes committed here."""
        return str(self.driver.physical().measured_bytes)

    def hang_up(self) -> str:
        """End every lease, after the use of what was lent, and begin anew."""
        self.driver.close()
        if self.page is not None:
            self.page.close()
        while self.connections:
            self.connections.pop().close()
        self.driver = make_driver(self.kind)
        return "closed"


def main(arguments: list[str]) -> None:
    """Serve until the input ends."""
    borrower = Borrower(*arguments)
    for line in sys.stdin:
        name, *words = line.split()
        verb: Any = getattr(borrower, name)
        try:
            answer = verb(*words)
        except VmmError as error:
            answer = type(error).__name__
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
