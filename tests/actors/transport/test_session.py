"""`PullClient` and `PullServer`: whole conversations in memory, and what each refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.transport import messages as m
from actors.transport.frames import HEADER_BYTES, pack_frame, parse_header, parse_message
from actors.transport.kinds import ANY_INCARNATION, ErrorCode, MissingReason
from actors.transport.report import Outcome
from actors.transport.session import PullClient, PullServer
from actors.transport.session import instructions as i
from actors.transport.session.tables import ClientState, ServerState
from codec.errors import PeerLostError, ProtocolError, StaleIncarnationError
from tests.actors.transport.samples import SampleSource, samples, want
from tests.actors.transport.talk import (
    CLIENT_NONCE,
    INCARNATION,
    SERVER_NONCE,
    Talk,
    greeted,
    new_client,
    new_server,
    pull_of,
)

SIZES = (1, 32, 33, 5000, 65536)


def say(machine: PullClient | PullServer, message: m.Message, request_id: int = 0) -> list[object]:
    """Let ``machine`` hear one frame, as the pieces it wants."""
    rest = memoryview(pack_frame(message, request_id=request_id))
    heard: list[object] = []
    while rest:
        taken = max(machine.bytes_wanted, 1)
        heard += machine.receive(rest[:taken])
        rest = rest[taken:]
    return heard


def message_in(send: i.Instruction) -> m.Message:
    """What a `Send` says."""
    assert isinstance(send, i.Send)
    header = parse_header(send.data[:HEADER_BYTES], peer="test")
    return parse_message(header, send.data[HEADER_BYTES:], peer="test")


def outcomes(talk: Talk) -> list[Outcome]:
    """How each want ended."""
    return [line.outcome for line in talk.client.outcomes()]


# Conversations


@pytest.mark.parametrize("chunk_bytes", [1, 7, 31, 32, 1 << 20])
@pytest.mark.parametrize("window", [1, 2, 4])
def test_a_pull_delivers_everything_in_any_fragments(chunk_bytes: int, window: int) -> None:
    """Byte by byte or all at once: the same components, then ACK, then parting."""
    held = samples(SIZES)
    talk = greeted(SampleSource(held), window=window, chunk_bytes=chunk_bytes)

    talk.run(talk.client.pull(pull_of(held)))
    talk.run(talk.client.leave())

    assert list(talk.committed.values()) == list(held.values())
    assert outcomes(talk) == [Outcome.DELIVERED] * len(SIZES)
    assert talk.client.payload_bytes == sum(SIZES)
    assert talk.released == [()]
    assert (talk.client.state, talk.server.state) == (ClientState.CLOSED, ServerState.CLOSED)
    assert talk.num_closes == 2
    assert not talk.to_client
    assert not talk.to_server


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=8),
    st.integers(1, 200),
    st.integers(1, 4),
    st.data(),
)
def test_whatever_is_held_is_delivered_within_the_limit(
    sizes: list[int], chunk_bytes: int, window: int, data: st.DataObject
) -> None:
    """Size 0 means not held.  The oracle adds up sizes in order, as the server must."""
    held = {named: blob for named, blob in samples(sizes).items() if blob}
    limit = data.draw(st.integers(0, sum(sizes)))
    talk = greeted(SampleSource(held), window=window, chunk_bytes=chunk_bytes)

    talk.run(talk.client.pull(pull_of(samples(sizes), max_bytes=limit)))

    expected, spent = [], 0
    for size in sizes:
        fits = spent + size <= limit
        spent += size if fits else 0
        late = Outcome.DELIVERED if fits else Outcome.OVER_LIMIT
        expected.append(late if size else Outcome.ABSENT)
    assert outcomes(talk) == expected
    assert talk.client.state is ClientState.READY


def test_a_missing_component_does_not_end_the_pull() -> None:
    """Those before and after it arrive."""
    held = samples(SIZES)
    del held[want(1)]
    talk = greeted(SampleSource(held))

    talk.run(talk.client.pull(pull_of(samples(SIZES))))

    assert outcomes(talk)[:3] == [Outcome.DELIVERED, Outcome.ABSENT, Outcome.DELIVERED]
    assert talk.client.outcomes()[1].stored_bytes == 0


def test_a_damaged_payload_is_discarded_and_the_server_told() -> None:
    """One flipped bit; the others are delivered."""
    held = samples(SIZES)
    talk = greeted(SampleSource(held))
    talk.damage = lambda index, data: bytes([data[0] ^ 1]) + data[1:] if index == 2 else data

    talk.run(talk.client.pull(pull_of(held)))

    assert outcomes(talk)[2] is Outcome.CORRUPT
    assert 2 not in talk.committed
    assert i.Commit(2) not in talk.log
    assert i.Discard(2) in talk.log
    assert talk.released == [(want(2),)]


def test_a_payload_that_the_sink_finds_corrupt_is_rejected_too() -> None:
    """The bytes are what was sent; what was sent is not a blob."""
    held = samples(SIZES)
    talk = greeted(SampleSource(held))
    talk.commit_as = lambda index: Outcome.CORRUPT if index == 0 else Outcome.DELIVERED

    talk.run(talk.client.pull(pull_of(held)))

    assert talk.released == [(want(0),)]


def test_a_full_sink_ends_the_pull_early() -> None:
    """What came before stands; what comes after was never tried; nothing is acknowledged."""
    held = samples(SIZES)
    talk = greeted(SampleSource(held))
    talk.full = {2}

    talk.run(talk.client.pull(pull_of(held)))

    assert outcomes(talk) == [Outcome.DELIVERED] * 2 + [Outcome.NO_ROOM] * 3
    assert talk.client.state is ClientState.ABANDONED
    assert talk.client.bytes_wanted == 0
    assert talk.released == []


def test_a_full_sink_lets_what_is_in_flight_settle() -> None:
    """Index 0 is still on its way when index 1 finds no room."""
    held = samples((10, 20))
    talk = greeted(SampleSource(held))
    client = talk.client
    talk.to_server += client.pull(pull_of(held)).data
    talk._feed_server()
    say(client, m.Component(0, want(0), 10, _checksum(held, 0)), 1)
    say(client, m.Payload(10), 1)
    say(client, m.Component(1, want(1), 20, _checksum(held, 1)), 1)
    say(client, m.Payload(20), 1)

    client.no_room(1)

    assert client.payload_received(0, memoryview(held[want(0)])) == [i.Commit(0)]
    assert client.settled(0, Outcome.DELIVERED) == []
    assert outcomes(talk) == [Outcome.DELIVERED, Outcome.NO_ROOM]


def _checksum(held: dict[m.Want, bytes], index: int) -> bytes:
    server = new_server()
    say(server, m.Hello("left", INCARNATION, CLIENT_NONCE))
    say(server, pull_of([want(index)]), 1)
    component = message_in(server.opened(memoryview(held[want(index)]))[0])
    assert isinstance(component, m.Component)
    return component.checksum


def test_one_session_carries_many_requests() -> None:
    """Pull, ping, probe and pull again; request ids keep them apart."""
    held = samples(SIZES)
    talk = greeted(SampleSource(held))

    talk.run(talk.client.pull(pull_of([want(0)])))
    talk.run(talk.client.ping(b"p" * 16))
    talk.run(talk.client.probe(1000))
    talk.run(talk.client.pull(pull_of([want(3), want(9)])))

    assert i.ReceiveProbe(1, 1000) in talk.log
    assert outcomes(talk) == [Outcome.DELIVERED, Outcome.ABSENT]
    assert talk.committed[0] == held[want(3)]
    assert talk.client.state is ClientState.READY


def test_payload_ordinals_count_over_the_session() -> None:
    """Both sides count probes and components alike, from 0."""
    talk = greeted(SampleSource(samples((5, 6))))

    talk.run(talk.client.pull(pull_of([want(0), want(1)])))
    talk.run(talk.client.probe(10))
    talk.run(talk.client.pull(pull_of([want(1)])))

    told = [x for x in talk.log if isinstance(x, i.ReceivePayload | i.ReceiveProbe)]
    assert [x.ordinal for x in told] == talk.ordinals == [0, 1, 2, 3]


def test_the_window_bounds_what_is_in_flight() -> None:
    """The client wants no more frames until one of two payloads is settled."""
    talk = greeted(window=2)
    client = talk.client
    client.pull(pull_of([want(0), want(1), want(2)]))
    for index in range(2):
        say(client, m.Component(index, want(index), 5, bytes(16)), 1)
        say(client, m.Payload(5), 1)

    assert client.bytes_wanted == 0
    client.settled(0, Outcome.DELIVERED)
    assert client.bytes_wanted == HEADER_BYTES
    client.check()


def test_any_incarnation_may_be_meant() -> None:
    """A link can be measured by someone who has never met the worker."""
    client = new_client(incarnation=ANY_INCARNATION)
    talk = Talk(client, new_server(), SampleSource({}))

    talk.run(client.greet())

    assert client.state is ClientState.READY


def test_features_are_those_that_both_sides_have() -> None:
    """The server answers with its own value for a shared name."""
    offered = (m.Feature("a", b"1"), m.Feature("c", b"2"))
    client = PullClient(
        node="left", server_node="right", incarnation=77, nonce=CLIENT_NONCE, features=offered
    )
    server = PullServer(
        node="right",
        incarnation=INCARNATION,
        nonce=SERVER_NONCE,
        features=(m.Feature("b"), m.Feature("c", b"3")),
    )

    Talk(client, server, SampleSource({})).run(client.greet())

    assert client.features == (m.Feature("c", b"3"),)


# Incarnations, identities and errors


def test_a_stale_incarnation_is_an_error_on_both_sides() -> None:
    """The server refuses, and tells the client which incarnation it is."""
    client, server = new_client(incarnation=5), new_server()
    hello = message_in(client.greet())
    with pytest.raises(StaleIncarnationError) as counted:
        say(server, hello)
    send, close = server.farewell(counted.value)

    assert close == i.Close()
    with pytest.raises(StaleIncarnationError) as raised:
        say(client, message_in(send))
    assert (raised.value.node, raised.value.wanted, raised.value.found) == ("right", 5, 77)
    assert server.farewell(counted.value) == []


def test_the_client_checks_the_incarnation_itself() -> None:
    """A server that says WELCOME to the wrong name is not believed."""
    client = new_client()
    client.greet()

    with pytest.raises(StaleIncarnationError):
        say(client, m.Welcome("right", 78, CLIENT_NONCE, SERVER_NONCE))

    assert client.state is ClientState.FAILED


WRONG_WELCOMES = {
    "another nonce": (m.Welcome("right", 77, SERVER_NONCE, SERVER_NONCE), ProtocolError),
    "another node": (m.Welcome("wrong", 77, CLIENT_NONCE, SERVER_NONCE), PeerLostError),
    "a feature nobody offered": (
        m.Welcome("right", 77, CLIENT_NONCE, SERVER_NONCE, (m.Feature("x"),)),
        ProtocolError,
    ),
}


@pytest.mark.parametrize(("welcome", "error"), WRONG_WELCOMES.values(), ids=WRONG_WELCOMES.keys())
def test_a_wrong_welcome_is_refused(welcome: m.Welcome, error: type[Exception]) -> None:
    """Whoever answers must be whom we called."""
    client = new_client()
    client.greet()

    with pytest.raises(error):
        say(client, welcome)

    assert client.state is ClientState.FAILED
    assert client.bytes_wanted == 0


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (m.Error(ErrorCode.PROTOCOL, 0, "why"), ProtocolError),
        (m.Error(ErrorCode.INTERNAL, 0, "why"), PeerLostError),
        (m.Error(ErrorCode.STALE_INCARNATION, 9, ""), StaleIncarnationError),
    ],
)
def test_an_error_from_the_server_keeps_its_kind(error: m.Error, kind: type[Exception]) -> None:
    """In the middle of a stream as well."""
    client = greeted().client
    client.pull(pull_of([want(0)]))

    with pytest.raises(kind):
        say(client, error)

    assert client.bytes_wanted == 0


def test_a_farewell_tells_no_secrets_and_fits() -> None:
    """Our own errors give their type only; a long reason is cut at a character."""
    server = new_server()
    internal = message_in(server.farewell(KeyError("secret"))[0])
    server = new_server()
    long = message_in(server.farewell(ProtocolError("peer", "é" * 500))[0])

    assert internal == m.Error(ErrorCode.INTERNAL, 0, "KeyError")
    assert long == m.Error(ErrorCode.PROTOCOL, 0, "é" * 128)


# What a client refuses in a stream that the tables allow

CHECKSUM = bytes(16)
COMPONENT = m.Component(0, want(0), 10, CHECKSUM)
BAD_STREAMS: dict[str, list[m.Message]] = {
    "an index twice": [m.Missing(0, MissingReason.UNKNOWN), m.Missing(0, MissingReason.UNKNOWN)],
    "an index skipped": [m.Missing(1, MissingReason.UNKNOWN)],
    "an index too far": [
        m.Missing(0, MissingReason.UNKNOWN),
        m.Missing(1, MissingReason.UNKNOWN),
        m.Missing(2, MissingReason.UNKNOWN),
    ],
    "another component": [replace(COMPONENT, want=want(1))],
    "more bytes than allowed": [replace(COMPONENT, stored_bytes=101)],
    "more bytes than allowed in all": [
        replace(COMPONENT, stored_bytes=60),
        m.Payload(60),
        m.Component(1, want(1), 41, CHECKSUM),
    ],
    "a payload of another size": [COMPONENT, m.Payload(11)],
    "an early end": [m.Missing(0, MissingReason.UNKNOWN), m.End(0, 0)],
    "a wrong count": [
        m.Missing(0, MissingReason.UNKNOWN),
        m.Missing(1, MissingReason.UNKNOWN),
        m.End(1, 0),
    ],
    "a wrong total": [
        COMPONENT,
        m.Payload(10),
        m.Missing(1, MissingReason.UNKNOWN),
        m.End(1, 11),
    ],
}


@pytest.mark.parametrize("stream", BAD_STREAMS.values(), ids=BAD_STREAMS.keys())
def test_a_stream_that_does_not_add_up_is_refused(stream: list[m.Message]) -> None:
    """Only the last frame is wrong."""
    client = greeted().client
    client.pull(pull_of([want(0), want(1)], max_bytes=100))
    for message in stream[:-1]:
        say(client, message, 1)

    with pytest.raises(ProtocolError):
        say(client, stream[-1], 1)

    assert client.state is ClientState.FAILED


def test_a_reply_to_another_ping_is_refused() -> None:
    """The nonce ties the two together; a question is no answer."""
    for wrong in (m.Ping(b"q" * 16, is_reply=True), m.Ping(b"p" * 16)):
        client = greeted().client
        client.ping(b"p" * 16)
        with pytest.raises(ProtocolError):
            say(client, wrong, 1)


def test_a_probe_of_another_size_is_refused() -> None:
    """Else the measured rate would be wrong."""
    client = greeted().client
    client.probe(10)

    with pytest.raises(ProtocolError):
        say(client, m.Payload(11), 1)


# What a server refuses


def streaming_server() -> PullServer:
    """A server that has been asked for two components."""
    server = new_server()
    say(server, m.Hello("left", INCARNATION, CLIENT_NONCE))
    say(server, pull_of([want(0), want(1)]), 1)
    return server


def test_an_ack_that_rejects_what_was_not_sent_is_refused() -> None:
    """Index 1 was declared missing."""
    server = streaming_server()
    server.opened(memoryview(b"abc"))
    server.missing(MissingReason.UNKNOWN)

    with pytest.raises(ProtocolError):
        say(server, m.Ack((1,)), 1)


def test_a_ping_reply_that_nobody_asked_for_is_refused() -> None:
    """Two servers cannot bounce one for ever."""
    server = new_server()
    say(server, m.Hello("left", INCARNATION, CLIENT_NONCE))

    with pytest.raises(ProtocolError):
        say(server, m.Ping(b"p" * 16, is_reply=True), 1)


def test_an_empty_component_is_unreadable_and_a_huge_one_over_the_limit() -> None:
    """Neither can be announced; the pull goes on."""
    server = streaming_server()
    send, following = server.opened(memoryview(b""))
    assert message_in(send) == m.Missing(0, MissingReason.UNREADABLE)
    assert following == i.OpenComponent(1, want(1))

    server = new_server()
    say(server, m.Hello("left", INCARNATION, CLIENT_NONCE))
    say(server, pull_of([want(0)], max_bytes=3), 1)
    assert message_in(server.opened(memoryview(b"abcd"))[0]) == m.Missing(
        0, MissingReason.OVER_LIMIT
    )


def test_a_server_knows_its_client_by_name() -> None:
    """Errors name the node that caused them."""
    server = new_server()
    say(server, m.Hello("left", INCARNATION, CLIENT_NONCE))

    with pytest.raises(ProtocolError) as caught:
        say(server, m.Bye(), 3)

    assert (server.peer, caught.value.peer) == ("left", "left")


# Misuse by our own side


MISUSES: dict[str, Callable[[], object]] = {
    "pull before greeting": lambda: new_client().pull(pull_of([want(0)])),
    "ping before greeting": lambda: new_client().ping(bytes(16)),
    "settle what is not in flight": lambda: greeted().client.settled(0, Outcome.DELIVERED),
    "receive what is not in flight": lambda: greeted().client.payload_received(0, memoryview(b"")),
    "no room for nothing": lambda: greeted().client.no_room(0),
    "ask for a want without a pull": lambda: greeted().client.want(0),
    "open when nothing is asked": lambda: new_server().opened(memoryview(b"x")),
    "miss when nothing is asked": lambda: new_server().missing(MissingReason.UNKNOWN),
    "feed more than wanted": lambda: new_server().receive(bytes(HEADER_BYTES + 1)),
    "feed when nothing is wanted": lambda: new_client().receive(b"x"),
    "no window": lambda: new_client(window=0),
}


@pytest.mark.parametrize("misuse", MISUSES.values(), ids=MISUSES.keys())
def test_misuse_is_refused(misuse: Callable[[], object]) -> None:
    """By the kind of error that says the fault is ours."""
    with pytest.raises(ValueError, match=r"cannot|not in flight|no pull|nothing|wanted|window"):
        misuse()


def test_a_refused_call_changes_nothing() -> None:
    """The session goes on as if it had not been made."""
    held = samples(SIZES)
    talk = greeted(SampleSource(held))
    for refused in (talk.client.greet, lambda: talk.client.receive(b"x")):
        with pytest.raises(ValueError, match=r"cannot|wanted"):
            refused()
    with pytest.raises(ValueError, match="need 1"):
        talk.client.probe(0)

    talk.run(talk.client.pull(pull_of(held)))

    assert outcomes(talk) == [Outcome.DELIVERED] * len(SIZES)


def test_outcomes_are_not_told_before_the_end() -> None:
    """Half a report would be taken for a whole one."""
    client = greeted().client
    client.pull(pull_of([want(0)]))

    with pytest.raises(ValueError, match="not over"):
        client.outcomes()
