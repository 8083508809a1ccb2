"""`sharing`: two real processes, one memory; leases, generations, and what is refused."""

from __future__ import annotations

import array
import fcntl
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from actors.arena.driver import Access, Driver, Share, Span
from actors.arena.driver_cuda import CudaVmmDriver
from actors.arena.driver_host import HostVmmDriver
from actors.arena.sharing import GenerationPage, Lent, borrow, lend
from codec.errors import VmmBusy, VmmNotShared
from tests.fakes.cuda_fake import fake_cuda
from tests.suites.borrowing_process import GRANULE, TIMEOUT_S
from tests.suites.driver_suite import count_open_files

ROOT = Path(__file__).parents[3]


class Peer:
    """A process that borrows, and what it answers."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.leases: list[Lent] = []
        path = folder / "socket"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.listener.settimeout(TIMEOUT_S)
        fake = [str(fake_cuda().path)] if kind == "cuda" else []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.suites.borrowing_process", str(path), kind, *fake],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, *words: object) -> None:
        """Tell it to do something."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        """The line that it answers."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, *words: object) -> str:
        """Tell it, and wait for what it answers."""
        self.send(*words)
        return self.answer()

    def lend(self, share: Share, *words: object) -> tuple[Lent, str]:
        """Tell it to take what is lent; the lease, and its answer."""
        self.send(*words)
        connection, _ = self.listener.accept()
        self.leases.append(lend(connection, share))
        share.close()
        return self.leases[-1], self.answer()

    def kill(self) -> None:
        """End it as the system does when memory runs out."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def rest(self) -> None:
        """Have it end every lease, if it lives."""
        if self.process.poll() is None:
            assert self.ask("hang_up") == "closed"
        while self.leases:
            self.leases.pop().close()

    def close(self) -> None:
        """End it, whatever it does."""
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        self.listener.close()


class Owner:
    """A driver with one granule that says who it is."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.va = driver.reserve(GRANULE)
        self.handle = driver.create(GRANULE)
        driver.map(self.va, self.handle)
        driver.set_access([Span(self.va, GRANULE)], Access.READ_WRITE)
        driver.copy_in(self.va, b"owner's")

    def reclaim(self, lent: Lent) -> None:
        """Use the memory for something else, if the lease has ended."""
        lent.close()
        self.driver.copy_in(self.va, b"another")


@pytest.fixture(scope="module", params=["host", "cuda"])
def kind(request: pytest.FixtureRequest) -> str:
    """Both kinds of memory, of which one is a stand-in's."""
    return str(request.param)


@pytest.fixture(scope="module")
def peers(kind: str) -> Iterator[list[Peer]]:
    """Processes that lived, of which only the last may still."""
    peers: list[Peer] = []
    yield peers
    for peer in peers:
        peer.close()


@pytest.fixture
def peer(peers: list[Peer], kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    """The other process, new if a test has killed the last one."""
    if not peers or peers[-1].process.poll() is not None:
        peers.append(Peer(tmp_path_factory.mktemp("peer"), kind))
    yield peers[-1]
    peers[-1].rest()


@pytest.fixture
def owner(kind: str) -> Iterator[Owner]:
    """The memory of this process, which has every byte back in the end."""
    if kind == "cuda":
        fake_cuda().size(GRANULE)
        driver: Driver = CudaVmmDriver(0, capacity_bytes=2 * GRANULE)
    else:
        driver = HostVmmDriver(2 * GRANULE, GRANULE)
    owner = Owner(driver)
    yield owner
    driver.unmap(owner.va)
    driver.release(owner.handle)
    assert driver.physical().measured_bytes == 0
    driver.close()


def wait_for_end(lent: Lent) -> None:
    """Wait until the other end of a lease is closed, by whatever."""
    connection = lent._connection
    assert connection is not None
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        assert selector.select(TIMEOUT_S)


def test_two_processes_have_one_memory(owner: Owner, peer: Peer) -> None:
    """What either writes the other reads, and only its owner counts it."""
    share = owner.driver.export(owner.handle, writable=True)

    lent, identity = peer.lend(share, "take", "read_write")

    assert identity == lent.identity == share.identity
    assert peer.ask("read", 7) == "owner's"
    assert peer.ask("write", "theirs!") == "theirs!"
    assert owner.driver.copy_out(owner.va, 7) == b"theirs!"
    owner.driver.copy_in(owner.va, b"both's!")
    assert peer.ask("read", 7) == "both's!"
    assert peer.ask("physical") == "0"


def test_what_is_lent_for_reading_is_not_written(owner: Owner, peer: Peer) -> None:
    """The importer's driver refuses, and its mapping stays as it was."""
    _lent, _ = peer.lend(owner.driver.export(owner.handle), "take", "read")

    assert peer.ask("open", "read_write") == "VmmNotShared"
    assert peer.ask("write", "theirs!") == "VmmNotMapped"
    assert peer.ask("read", 7) == "owner's"
    assert owner.driver.copy_out(owner.va, 7) == b"owner's"


@pytest.mark.parametrize("end", [lambda p: p.ask("hang_up"), Peer.kill], ids=["close", "kill"])
def test_memory_is_reclaimed_after_its_lease_and_not_before(
    owner: Owner, peer: Peer, end: Callable[[Peer], object]
) -> None:
    """However the importer ends: by giving back, or killed without a word."""
    lent, _ = peer.lend(owner.driver.export(owner.handle), "take", "read")
    assert lent.is_live()
    with pytest.raises(VmmBusy, match="lease"):
        owner.reclaim(lent)
    assert peer.ask("read", 7) == "owner's"

    end(peer)
    wait_for_end(lent)

    assert not lent.is_live()
    owner.reclaim(lent)
    assert owner.driver.copy_out(owner.va, 7) == b"another"


def test_an_importer_sees_that_memory_was_used_anew(owner: Owner, peer: Peer) -> None:
    """The bytes alone would not tell it."""
    page = GenerationPage.create(4)
    page.advance(3, 7)
    _lent, _ = peer.lend(owner.driver.export(owner.handle), "take", "read")
    _page_lent, num_names = peer.lend(page.share("arena/generations"), "take_page")
    assert num_names == "4"
    assert (peer.ask("generation", 3), peer.ask("read", 7)) == ("7", "owner's")
    assert peer.ask("generation", 3) == "7"

    page.advance(3, 8)
    owner.driver.copy_in(owner.va, b"another")

    assert (peer.ask("read", 7), peer.ask("generation", 3)) == ("another", "8")
    assert peer.ask("generation", 2) == "0"
    page.close()


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection within this process; no descriptor is left open."""
    before = count_open_files()
    one, other = socket.socketpair()
    yield one, other
    one.close()
    other.close()
    assert count_open_files() == before


@pytest.fixture
def share() -> Iterator[Share]:
    """A share of some memory."""
    driver = HostVmmDriver(GRANULE, GRANULE)
    share = driver.export(driver.create(GRANULE))
    yield share
    share.close()
    driver.close()


def message_of(share: Share, ends: tuple[socket.socket, socket.socket]) -> bytes:
    """The bytes that a share travels as."""
    with ends[0].dup() as end:
        lend(end, share)
        data, fds, _, _ = socket.recv_fds(ends[1], 4096, 1)
    os.close(fds[0])
    return data


def test_what_arrives_is_what_was_lent(
    share: Share, ends: tuple[socket.socket, socket.socket]
) -> None:
    """Every field, and a descriptor of its own that no program inherits."""
    lent = lend(ends[0], share)

    got = borrow(ends[1], TIMEOUT_S)

    for name in ("kind", "offset_bytes", "nbytes", "identity", "is_writable"):
        assert getattr(got, name) == getattr(share, name)
    assert got.fd != share.fd
    assert os.fstat(got.fd) == os.fstat(share.fd)
    assert not os.get_inheritable(got.fd)
    got.close()
    assert lent.is_live()


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda data: data[:1],
        lambda data: data[:-1],
        lambda data: b"kvshare2" + data[8:],
        lambda data: bytes(len(data)),
        lambda data: data[:-1] + b"\xff",
    ],
    ids=["nothing", "one byte", "cut", "other version", "zeros", "no text"],
)
def test_what_is_no_message_is_refused(
    share: Share, ends: tuple[socket.socket, socket.socket], damage: Callable[[bytes], bytes]
) -> None:
    """The descriptor that came with it is closed again."""
    data = damage(message_of(share, ends))
    if data:
        socket.send_fds(ends[0], [data], [share.fd])
    ends[0].shutdown(socket.SHUT_WR)

    with pytest.raises(VmmNotShared):
        borrow(ends[1], TIMEOUT_S)


@pytest.mark.parametrize("num_fds", [0, 2, 3])
def test_a_message_has_one_descriptor(
    share: Share, ends: tuple[socket.socket, socket.socket], num_fds: int
) -> None:
    """With none there is no memory; one too many would stay open."""
    data = message_of(share, ends)
    fds = array.array("i", [share.fd] * num_fds)
    extras = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if num_fds else []
    ends[0].sendmsg([data], extras)

    with pytest.raises(VmmNotShared, match="descriptors"):
        borrow(ends[1], TIMEOUT_S)


def test_an_end_that_says_nothing_is_not_waited_for(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """No message by then is as good as none."""
    with pytest.raises(VmmNotShared, match="timed out"):
        borrow(ends[1], timeout_s=1e-3)


def test_a_message_in_pieces_is_one(
    share: Share, ends: tuple[socket.socket, socket.socket]
) -> None:
    """A connection is a stream, and may cut anywhere."""
    data = message_of(share, ends)
    socket.send_fds(ends[0], [data[:5]], [share.fd])
    for start in range(5, len(data), 50):
        ends[0].sendall(data[start : start + 50])

    got = borrow(ends[1], TIMEOUT_S)

    assert got.identity == share.identity
    got.close()


@pytest.mark.parametrize("changes", [{"identity": "x" * 97}, {"kind": "x" * 17}, {"fd": -1}])
def test_what_fits_no_message_is_not_lent(
    share: Share, ends: tuple[socket.socket, socket.socket], changes: dict[str, object]
) -> None:
    """Nothing is sent then."""
    with pytest.raises(VmmNotShared):
        lend(ends[0], replace(share, **changes))  # type: ignore[arg-type]

    ends[0].shutdown(socket.SHUT_WR)
    assert ends[1].recv(1) == b""


def test_nothing_is_lent_to_nobody(share: Share, ends: tuple[socket.socket, socket.socket]) -> None:
    """Where the other end is gone already, there is no lease to wait for."""
    ends[1].close()

    with pytest.raises(VmmNotShared, match="gone"):
        lend(ends[0], share)


def test_an_importer_that_talks_still_has_its_lease(
    share: Share, ends: tuple[socket.socket, socket.socket]
) -> None:
    """What it sends means nothing; that it has closed is seen behind it."""
    lent = lend(ends[0], share)
    borrow(ends[1], TIMEOUT_S).close()
    ends[1].sendall(b"thanks" * 1000)
    assert lent.is_live()
    assert lent.is_live()

    ends[1].sendall(b"farewell" * 2500)
    ends[1].close()

    assert not lent.is_live()
    lent.close()


@pytest.mark.parametrize(
    ("seals", "size", "match"),
    [
        (0, GRANULE, "shrinking"),
        (fcntl.F_SEAL_GROW, GRANULE, "shrinking"),
        (fcntl.F_SEAL_SHRINK, GRANULE - 1, "bytes"),
    ],
)
def test_a_file_that_can_be_cut_or_is_too_short_is_not_mapped(
    share: Share, seals: int, size: int, match: str
) -> None:
    """Whoever cuts a file kills those who touch a mapping of it."""
    driver = HostVmmDriver(GRANULE, GRANULE)
    fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    num_files = count_open_files()

    with pytest.raises(VmmNotShared, match=match):
        driver.import_(replace(share, fd=fd, offset_bytes=0))

    assert count_open_files() == num_files
    os.close(fd)
    driver.close()


def test_a_share_that_says_it_may_be_written_is_not_believed(share: Share) -> None:
    """The descriptor decides."""
    driver = HostVmmDriver(GRANULE, GRANULE)
    va = driver.reserve(GRANULE)

    driver.map(va, driver.import_(replace(share, is_writable=True)))

    with pytest.raises(VmmNotShared):
        driver.set_access([Span(va, GRANULE)], Access.READ_WRITE)
    driver.close()


def test_generations_rise_and_are_their_owners() -> None:
    """A number that came back would call old bytes new."""
    page = GenerationPage.create(2)
    page.advance(1, 5)
    with page_of(page) as reader:
        for generation in (5, 4):
            with pytest.raises(ValueError, match="rise"):
                page.advance(1, generation)
        with pytest.raises(VmmNotShared, match="owner"):
            reader.advance(0, 1)

        assert [reader.generation(name) for name in (0, 1)] == [0, 5]
        for name in (2, -1):
            with pytest.raises(IndexError, match="name"):
                reader.generation(name)

    page.close()
    page.close()
    with pytest.raises(ValueError, match="num_names"):
        GenerationPage.create(0)


def test_a_copy_is_of_one_generation() -> None:
    """Not of the one before, nor of two: then there is none."""
    page = GenerationPage.create(1)
    page.advance(0, 5)

    def used_anew() -> bytes:
        page.advance(0, 6)
        return b"torn"

    assert page.copy_of(0, 5, lambda: b"whole") == b"whole"
    assert page.copy_of(0, 4, lambda: b"other") is None
    assert page.copy_of(0, 5, used_anew) is None
    assert page.generation(0) == 6
    page.close()


def test_a_forked_child_writes_no_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is one memory for both, and its numbers are its parent's."""
    page = GenerationPage.create(1)
    here = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: here + 1)

        with pytest.raises(VmmNotShared, match="owner"):
            page.advance(0, 1)

    assert page.generation(0) == 0
    page.close()


@contextmanager
def page_of(page: GenerationPage) -> Iterator[GenerationPage]:
    """The page as an importer has it."""
    share = page.share("page")
    reader = GenerationPage.open(share)
    share.close()
    yield reader
    reader.close()


@pytest.mark.parametrize("changes", [{"nbytes": 0}, {"nbytes": 12}, {"offset_bytes": 8}])
def test_what_is_no_page_of_generations_is_refused(changes: dict[str, int]) -> None:
    """Its size is whole numbers, from the start of its file."""
    page = GenerationPage.create(2)
    share = page.share("page")

    with pytest.raises(VmmNotShared, match="generations"):
        GenerationPage.open(replace(share, **changes))  # type: ignore[arg-type]

    share.close()
    page.close()
