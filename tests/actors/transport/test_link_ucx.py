"""`UcxLink` and `UcxListener` over real ucxx: two processes on loopback, and what breaks them.

The processes are `ucx_peer` children.  Deadlines here are generous: they bound a hang, and
no test depends on how long anything takes.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from actors.transport import link_ucx, runtime_ucx
from actors.transport.link_ucx import UcxLink, UcxListener, active_transports, shutdown
from codec.errors import BackendUnavailable
from tests.actors.transport.memory_endpoint import ERRORS, pair
from tests.actors.transport.samples import CODEC, SampleSink, SampleSource, key

pytestmark = pytest.mark.skipif(find_spec("ucxx") is None, reason="needs ucxx")

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": "lo",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "PYTHONPATH": str(ROOT),
}
HANG_S = 60.0
SIZES = [1, 2, 4095, 4096, 4097, 8191, 8192, 8193, 100_003, (1 << 20) + 1, 8 << 20, 7]
BIG = [16 << 20] * 8


class Child:
    """A `ucx_peer` process; whoever waits for it in vain kills it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.actors.transport.ucx_peer"],
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, do: str, **details: Any) -> None:
        """Give an order."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **details}) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Wait for the answer."""
        assert self.process.stdout is not None
        watchdog = threading.Timer(HANG_S, self.process.kill)
        watchdog.start()
        try:
            line = self.process.stdout.readline()
        finally:
            watchdog.cancel()
        assert line, f"the child has ended or hung: {self.process.poll()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, do: str, **details: Any) -> dict[str, Any]:
        """Give an order and wait for the answer."""
        self.tell(do, **details)
        return self.hear()

    def end(self) -> int:
        """Let it end by itself; return its exit status."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            return self.process.wait(HANG_S)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Child]:
    """A serving process; that it exits by itself is asserted at the end."""
    child = Child()
    yield child
    assert child.end() == 0


@pytest.fixture(scope="module")
def client() -> Iterator[Child]:
    """A pulling process; that it exits by itself is asserted at the end."""
    child = Child()
    yield child
    assert child.end() == 0


def test_components_of_every_size_arrive(server: Child, client: Child) -> None:
    """From one byte to 8 MiB, odd sizes and both sides of the eager limit, and one miss."""
    port = server.ask("listen", name="sizes", sizes=SIZES)["port"]

    answer = client.ask("pull", port=port, sizes=SIZES, extra=1)

    assert answer["outcomes"] == ["DELIVERED"] * len(SIZES) + ["ABSENT"]
    assert answer["committed"] == list(range(len(SIZES)))
    assert answer["is_equal"]
    assert answer["bytes_moved"] == sum(SIZES)
    assert 0 < answer["wire_bytes"] - answer["bytes_moved"] < 500 * len(SIZES)
    assert answer["has_times"]
    state = server.ask("state", name="sizes")
    assert (state["parted"], state["num_pinned"]) == (1, 0)
    assert (state["components_sent"], state["components_missing"]) == (len(SIZES), 1)


def test_many_small_components_arrive(server: Child, client: Child) -> None:
    """As many as one pull may name; the request itself takes two messages."""
    sizes = [100 + index % 7 for index in range(1024)]
    port = server.ask("listen", name="many", sizes=sizes)["port"]

    answer = client.ask("pull", port=port, sizes=sizes)

    assert answer["outcomes"] == ["DELIVERED"] * 1024
    assert answer["is_equal"]


def test_pulls_beside_each_other_do_not_mix(server: Child, client: Child) -> None:
    """More at once than there are places, over one worker on each side."""
    port = server.ask("listen", name="beside", sizes=SIZES)["port"]

    answers = client.ask("pull_together", port=port, sizes=SIZES, count=9)["answers"]

    assert len(answers) == 9
    assert all(answer["outcomes"] == ["DELIVERED"] * len(SIZES) for answer in answers)
    assert all(answer["is_equal"] for answer in answers)


def test_a_flipped_byte_is_found_and_not_committed(server: Child, client: Child) -> None:
    """The server's memory went bad after the checksum was made."""
    sizes = [5, 20_000, 1 << 20]
    port = server.ask("listen", name="flip", sizes=sizes, flip=True)["port"]

    answer = client.ask("pull", port=port, sizes=sizes)

    assert answer["outcomes"] == ["CORRUPT"] * 3
    assert answer["ended"] == {"aborted": 3}
    assert answer["committed"] == []
    assert server.ask("state", name="flip")["components_rejected"] == 3


def test_a_full_sink_is_a_miss(server: Child, client: Child) -> None:
    """What fitted before it was delivered, and the server lets go of the rest."""
    sizes = [1 << 20] * 6
    port = server.ask("listen", name="full", sizes=sizes)["port"]

    answer = client.ask("pull", port=port, sizes=sizes, capacity_bytes=2 << 20)

    assert answer["outcomes"] == ["DELIVERED"] * 2 + ["NO_ROOM"] * 4
    assert (answer["num_open"], answer["num_zombies"]) == (0, 0)
    assert server.ask("state", name="full")["num_pinned"] == 0


def test_a_wrong_incarnation_is_stale(server: Child, client: Child) -> None:
    """Nothing is transferred, and the server counts it."""
    port = server.ask("listen", name="stale", sizes=SIZES)["port"]

    answer = client.ask("pull", port=port, sizes=SIZES, incarnation=12)

    assert answer["error"] == "StaleIncarnationError"
    assert "caller meant 12" in answer["text"]
    assert answer["ended"] == {}
    assert server.ask("state", name="stale")["stale_incarnations"] == 1


def test_a_port_that_now_belongs_to_another_node_is_a_lost_peer(
    server: Child, client: Child
) -> None:
    """Ports are reused; names tell."""
    port = server.ask("listen", name="other", sizes=SIZES)["port"]

    answer = client.ask("pull", port=port, sizes=SIZES, node="someone else")

    assert answer["error"] == "PeerLostError"


def test_a_server_killed_in_mid_transfer_is_lost(client: Child) -> None:
    """SIGKILL: every reservation is aborted, nothing half-received is committed."""
    victim = Child()
    try:
        port = victim.ask("listen", name="victim", sizes=BIG)["port"]
        client.tell("pull", port=port, sizes=BIG, tell_when_reserved=True)
        assert client.hear() == {"reserved": True}
        victim.process.kill()
        answer = client.hear()
    finally:
        victim.end()

    assert answer["error"] in ("PeerLostError", "TransferTimeoutError")
    assert len(answer["committed"]) < len(BIG)
    assert answer["ended"]["aborted"] >= 1
    assert (answer["num_open"], answer["num_zombies"]) == (0, 0)


def test_a_server_that_stops_in_mid_transfer_times_out(client: Child) -> None:
    """SIGSTOP: the connection looks alive, and UCX never says a word about it."""
    victim = Child()
    try:
        port = victim.ask("listen", name="victim", sizes=BIG)["port"]
        client.tell(
            "pull", port=port, sizes=BIG, tell_when_reserved=True, frame_s=1.0, payload_s=1.0
        )
        assert client.hear() == {"reserved": True}
        victim.process.send_signal(19)
        answer = client.hear()
        victim.process.kill()
    finally:
        victim.end()

    assert answer["error"] == "TransferTimeoutError"
    assert answer["ended"]["aborted"] >= 1
    assert (answer["num_open"], answer["num_zombies"]) == (0, 0)


def test_a_client_killed_in_mid_transfer_leaves_no_pins(server: Child) -> None:
    """The server notices, counts it and lets go."""
    port = server.ask("listen", name="widow", sizes=BIG)["port"]
    victim = Child()
    try:
        victim.tell("pull", port=port, sizes=BIG, tell_when_reserved=True)
        assert victim.hear() == {"reserved": True}
        victim.process.kill()
    finally:
        victim.end()

    state = server.ask("state", name="widow")
    assert (state["lost"] + state["timeouts"], state["num_pinned"]) == (1, 0)


def test_a_cancelled_pull_leaves_nothing_behind(server: Child, client: Child) -> None:
    """Cancelled with payloads in flight; the next pull works, on both sides."""
    port = server.ask("listen", name="cancel", sizes=BIG[:3])["port"]

    cancelled = client.ask("pull", port=port, sizes=BIG[:3], cancel_when_reserved=True)
    answer = client.ask("pull", port=port, sizes=BIG[:3])

    assert cancelled["error"] == "CancelledError"
    assert (cancelled["num_open"], cancelled["num_zombies"]) == (0, 0)
    assert answer["outcomes"] == ["DELIVERED"] * 3
    assert server.ask("state", name="cancel")["num_pinned"] == 0


def test_no_moment_is_a_bad_one_to_give_up(server: Child, client: Child) -> None:
    """Cancelled and late pulls in all their phases, connecting included; then a good one.

    A buffer given up too early would be written to: the process would crash, or find its
    later samples changed.
    """
    sizes = [5, 4 << 20, 20_000, 1 << 20]
    port = server.ask("listen", name="torment", sizes=sizes)["port"]

    torment = client.ask("torment", port=port, sizes=sizes, count=60)
    answer = client.ask("pull", port=port, sizes=sizes)

    assert sum(torment["ends"].values()) == 60
    assert set(torment["ends"]) <= {"none", "CancelledError", "TransferTimeoutError"}
    assert (torment["num_open"], torment["num_zombies"]) == (0, 0)
    assert answer["outcomes"] == ["DELIVERED"] * 4
    assert answer["is_equal"]
    assert server.ask("state", name="torment")["num_pinned"] == 0


def test_a_server_that_accepts_and_says_nothing_times_out(server: Child, client: Child) -> None:
    """A UCX endpoint is there; WELCOME never comes."""
    port = server.ask("listen_silently")["port"]

    answer = client.ask("pull", port=port, sizes=SIZES, frame_s=0.5)

    assert answer["error"] == "TransferTimeoutError"
    assert "greeting" in answer["text"]


def test_a_port_that_does_not_speak_ucx_times_out(client: Child) -> None:
    """It accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        answer = client.ask("pull", port=port, sizes=SIZES, connect_s=0.5)

    assert answer["error"] in ("TransferTimeoutError", "PeerLostError")
    assert "connecting" in answer["text"]


def test_a_closed_port_is_a_lost_peer(client: Child) -> None:
    """Nobody listens there any more."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    answer = client.ask("pull", port=port, sizes=SIZES)

    assert answer["error"] == "PeerLostError"


def test_garbage_on_the_port_does_not_disturb_the_server(server: Child, client: Child) -> None:
    """A few strangers knock, then a real client comes."""
    port = server.ask("listen", name="knocked", sizes=[5])["port"]
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(4096), b"\xff" * 4096):
        with socket.create_connection(("127.0.0.1", port), HANG_S) as stranger:
            stranger.sendall(data)

    answer = client.ask("pull", port=port, sizes=[5])
    assert answer.get("outcomes") == ["DELIVERED"], answer


def test_a_link_can_be_measured(server: Child, client: Child) -> None:
    """Both numbers are usable; how good they are is not for a test to say."""
    port = server.ask("listen", name="probe", sizes=[])["port"]

    probe = client.ask("measure", port=port)

    assert probe["t0_s"] >= 0
    assert probe["bytes_per_s"] > 0


def test_the_transports_in_use_are_told(client: Child) -> None:
    """As restricted above."""
    assert client.ask("transports") == {"transports": ["self", "tcp"]}


def test_ucx_can_be_shut_down_and_started_again(server: Child, client: Child) -> None:
    """In the same process, on the same loop, also after a connection that failed."""
    port = server.ask("listen", name="again", sizes=[5])["port"]

    for _ in range(2):
        client.ask("pull", port=1, sizes=[5])
        client.ask("restart")
        answer = client.ask("pull", port=port, sizes=[5])
        assert answer.get("outcomes") == ["DELIVERED"], answer


def test_a_process_exits_by_itself_even_with_a_pull_under_way() -> None:
    """Both ends shut down while the other is still talking."""
    one, other = Child(), Child()
    port = one.ask("listen", name="leaving", sizes=BIG)["port"]
    other.tell("pull", port=port, sizes=BIG, tell_when_reserved=True)
    assert other.hear() == {"reserved": True}

    assert one.end() == 0
    assert other.hear()["num_open"] == 0
    assert other.end() == 0


# In this process, without starting UCX


def listening(source: SampleSource) -> UcxListener:
    """A listener that believes it is running."""
    listener = UcxListener(source, node="n", incarnation=1)
    listener._listener = object()
    listener._runtime = runtime_ucx.Runtime(
        ucxx=sys,
        errors=ERRORS,
        loop=asyncio.get_running_loop(),
        pulls=asyncio.Semaphore(runtime_ucx.MAX_PULLS),
        sessions=asyncio.Semaphore(runtime_ucx.MAX_SESSIONS),
        wires=set(),
    )
    return listener


async def test_only_so_many_sessions_have_requests_in_flight() -> None:
    """The others wait for a place without one."""
    listener = listening(SampleSource({}))
    pairs = [pair() for _ in range(9)]
    tasks = [asyncio.ensure_future(listener._on_endpoint(far)) for _, far in pairs]
    for _ in range(5):
        await asyncio.sleep(0)
    assert sum(len(far.requests) for _, far in pairs) == runtime_ucx.MAX_SESSIONS
    assert listener.num_sessions == 9

    for near, _ in pairs:
        near.abort()
    await asyncio.wait(tasks)

    assert listener.num_sessions == 0
    assert (listener.counters().sessions, listener.counters().lost) == (9, 9)
    assert all(far.is_closed for _, far in pairs)


async def test_only_so_many_endpoints_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is cut off at once, and so is one that comes after the end."""
    monkeypatch.setattr(link_ucx, "MAX_WAITING", 2)
    listener = listening(SampleSource({}))
    pairs = [pair() for _ in range(4)]
    tasks = [asyncio.ensure_future(listener._on_endpoint(far)) for _, far in pairs[:3]]
    for _ in range(5):
        await asyncio.sleep(0)
    assert [far.is_closed for _, far in pairs] == [False, False, True, False]

    for near, _ in pairs[:2]:
        near.abort()
    await asyncio.wait(tasks)
    listener._listener = None
    await listener._on_endpoint(pairs[3][1])

    assert pairs[3][1].is_closed
    assert listener.counters().refused == 2


async def test_without_ucxx_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else of the module needs it."""
    monkeypatch.setitem(sys.modules, "ucxx", None)
    monkeypatch.setattr(runtime_ucx, "_runtime", None)
    listener = UcxListener(SampleSource({}), node="n", incarnation=1)

    for use in (listener.start, lambda: UcxLink(node="n").measure_link("h", 1, node="m")):
        with pytest.raises(BackendUnavailable, match="ucxx-cu12"):
            await use()
    with pytest.raises(BackendUnavailable):
        active_transports()


async def test_ucx_that_was_not_released_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would start and make no progress: an error is better than a hang."""
    monkeypatch.setattr(runtime_ucx, "_runtime", None)
    monkeypatch.setattr(runtime_ucx, "_is_spent", True)

    with pytest.raises(BackendUnavailable, match="new process"):
        await UcxListener(SampleSource({}), node="n", incarnation=1).start()


async def test_bad_arguments_are_refused_before_anything_starts() -> None:
    """An empty pull, a double one, no rounds, and the incarnation that means any."""
    link, sink = UcxLink(node="n"), SampleSink({})
    twice = [(key(1), CODEC)] * 2

    for wants in ([], twice):
        with pytest.raises(ValueError, match=r"need 1|once"):
            await link.pull("127.0.0.1", 1, wants, sink, node="m", incarnation=1)
    with pytest.raises(ValueError, match="num_rounds"):
        await link.measure_link("127.0.0.1", 1, node="m", num_rounds=0)
    with pytest.raises(ValueError, match="incarnation"):
        UcxListener(SampleSource({}), node="n", incarnation=0)


async def test_a_listener_that_does_not_run_has_no_port() -> None:
    """And closing it is no error; neither is shutting down what was never started."""
    listener = UcxListener(SampleSource({}), node="n", incarnation=1)

    with pytest.raises(RuntimeError, match="not running"):
        _ = listener.port
    await listener.close()
    await shutdown()


def test_ucx_belongs_to_the_loop_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another loop its futures would never be set: an error is better than a hang."""

    async def start() -> None:
        runtime_ucx.start()

    elsewhere = asyncio.new_event_loop()
    try:
        runtime = type("Started", (), {"loop": elsewhere})()
        monkeypatch.setattr(runtime_ucx, "_runtime", runtime)
        with pytest.raises(RuntimeError, match="event loop that started it"):
            asyncio.run(start())
    finally:
        elsewhere.close()
