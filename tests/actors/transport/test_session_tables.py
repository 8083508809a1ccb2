"""The tables: every (state, frame) is either listed or refused, and the two sides agree."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import pytest

from actors.transport import messages as m
from actors.transport.frames import HEADER_BYTES, pack_frame
from actors.transport.kinds import ErrorCode, FrameType, MissingReason
from actors.transport.session import PullClient, PullServer
from actors.transport.session.dialog import OPENING_TYPES, SESSION_TYPES
from actors.transport.session.tables import (
    CLIENT_RECEIVES,
    CLIENT_SENDS,
    SERVER_RECEIVES,
    SERVER_SENDS,
    ClientState,
    ServerState,
)
from codec.errors import ProtocolError
from tests.actors.transport.samples import want
from tests.actors.transport.talk import (
    CLIENT_NONCE,
    INCARNATION,
    SERVER_NONCE,
    greeted,
    new_client,
    new_server,
    pull_of,
)

NONCE = bytes(16)
SAMPLES: dict[FrameType, m.Message] = {
    message.type: message
    for message in (
        m.Hello("left", INCARNATION, CLIENT_NONCE),
        m.Welcome("right", INCARNATION, CLIENT_NONCE, SERVER_NONCE),
        pull_of([want(0)]),
        m.Component(0, want(0), 3, NONCE),
        m.Payload(3),
        m.Missing(0, MissingReason.UNKNOWN),
        m.End(0, 0),
        m.Ack(),
        m.Error(ErrorCode.INTERNAL, 0, "why"),
        m.Bye(),
        m.Ping(NONCE, is_reply=False),
        m.Probe(3),
    )
}


def header_of(kind: FrameType, request_id: int) -> bytes:
    """The header of a sound frame of that type."""
    return pack_frame(SAMPLES[kind], request_id=request_id)[:HEADER_BYTES]


def tell(machine: PullClient | PullServer, message: m.Message, request_id: int) -> None:
    """Let ``machine`` hear a whole frame."""
    rest = memoryview(pack_frame(message, request_id=request_id))
    while rest:
        taken = machine.bytes_wanted
        machine.receive(rest[:taken])
        rest = rest[taken:]


def break_protocol(machine: PullClient | PullServer) -> None:
    """Let ``machine`` hear what is no frame."""
    with pytest.raises(ProtocolError):
        machine.receive(bytes(HEADER_BYTES))


def client_in(state: ClientState) -> PullClient:
    """A client that has been brought into ``state`` by legal steps."""
    if state is ClientState.FRESH:
        return new_client()
    if state is ClientState.GREETING:
        client = new_client()
        client.greet()
        return client
    client = greeted().client
    steps: dict[ClientState, list[Callable[[], object]]] = {
        ClientState.READY: [],
        ClientState.PINGING: [lambda: client.ping(NONCE)],
        ClientState.PROBING: [lambda: client.probe(3)],
        ClientState.STREAMING: [lambda: client.pull(pull_of([want(0)]))],
        ClientState.LEAVING: [client.leave],
    }
    announce = lambda: tell(client, SAMPLES[FrameType.COMPONENT], 1)
    bring = lambda: tell(client, SAMPLES[FrameType.PAYLOAD], 1)
    end = lambda: tell(client, m.End(1, 3), 1)
    steps[ClientState.ANNOUNCED] = [*steps[ClientState.STREAMING], announce]
    steps[ClientState.SETTLING] = [*steps[ClientState.ANNOUNCED], bring, end]
    steps[ClientState.ABANDONED] = [*steps[ClientState.ANNOUNCED], bring, lambda: client.no_room(0)]
    steps[ClientState.CLOSED] = [client.leave, lambda: tell(client, m.Bye(), 0)]
    steps[ClientState.FAILED] = [
        *steps[ClientState.STREAMING],
        lambda: break_protocol(client),
    ]
    for step in steps[state]:
        step()
    return client


def server_in(state: ServerState) -> PullServer:
    """A server that has been brought into ``state`` by legal steps."""
    server = new_server()
    if state is ServerState.FRESH:
        return server
    tell(server, SAMPLES[FrameType.HELLO], 0)
    steps: dict[ServerState, list[Callable[[], object]]] = {
        ServerState.READY: [],
        ServerState.STREAMING: [lambda: tell(server, SAMPLES[FrameType.PULL], 1)],
        ServerState.CLOSED: [lambda: tell(server, m.Bye(), 0)],
        ServerState.FAILED: [lambda: break_protocol(server)],
    }
    miss = lambda: server.missing(MissingReason.UNKNOWN)
    steps[ServerState.AWAITING_ACK] = [*steps[ServerState.STREAMING], miss]
    for step in steps[state]:
        step()
    return server


#: States that a server passes through within one call.
PASSING = {ServerState.GREETED, ServerState.PINGED, ServerState.PROBED, ServerState.ANNOUNCED}
PASSING |= {ServerState.LEFT}
RESTING = [state for state in ServerState if state not in PASSING]


@pytest.mark.parametrize("kind", FrameType, ids=lambda kind: kind.name)
@pytest.mark.parametrize("state", ClientState, ids=lambda state: state.name)
def test_a_client_hears_exactly_what_its_table_lists(state: ClientState, kind: FrameType) -> None:
    """By the header alone: a frame out of turn is refused before its body is asked for."""
    client = client_in(state)
    assert client.state is state
    is_listening = any(listed is state for listed, _ in CLIENT_RECEIVES)
    request_id = 0 if kind in SESSION_TYPES else 1

    if not is_listening:
        assert client.bytes_wanted == 0
        with pytest.raises(ValueError, match="wanted 0 bytes"):
            client.receive(header_of(kind, request_id))
    elif (state, kind) in CLIENT_RECEIVES:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(client, "_obey", lambda message: [message])
            client.receive(header_of(kind, request_id))
        assert client.state is not ClientState.FAILED
    else:
        with pytest.raises(ProtocolError, match=kind.name):
            client.receive(header_of(kind, request_id))
        assert client.state is ClientState.FAILED


@pytest.mark.parametrize("kind", FrameType, ids=lambda kind: kind.name)
@pytest.mark.parametrize("state", RESTING, ids=lambda state: state.name)
def test_a_server_hears_exactly_what_its_table_lists(state: ServerState, kind: FrameType) -> None:
    """The same for the other side."""
    server = server_in(state)
    assert server.state is state
    is_listening = any(listed is state for listed, _ in SERVER_RECEIVES)
    opened = 1 if state in (ServerState.STREAMING, ServerState.AWAITING_ACK) else 0
    request_id = 0 if kind in SESSION_TYPES else opened + (kind in OPENING_TYPES)

    if not is_listening:
        assert server.bytes_wanted == 0
        with pytest.raises(ValueError, match="wanted 0 bytes"):
            server.receive(header_of(kind, request_id))
    elif (state, kind) in SERVER_RECEIVES:
        server.receive(header_of(kind, request_id))
        assert server.state is not ServerState.FAILED
    else:
        with pytest.raises(ProtocolError, match=kind.name):
            server.receive(header_of(kind, request_id))
        assert server.state is ServerState.FAILED
        assert server.bytes_wanted == 0


@pytest.mark.parametrize("state", ClientState, ids=lambda state: state.name)
def test_a_client_says_exactly_what_its_table_lists(state: ClientState) -> None:
    """Every call that speaks, in every state."""
    calls: dict[FrameType, Callable[[PullClient], object]] = {
        FrameType.HELLO: lambda client: client.greet(),
        FrameType.PULL: lambda client: client.pull(pull_of([want(0)])),
        FrameType.PING: lambda client: client.ping(NONCE),
        FrameType.PROBE: lambda client: client.probe(3),
        FrameType.BYE: lambda client: client.leave(),
    }
    assert {kind for _, kind in CLIENT_SENDS} == {*calls, FrameType.ACK}

    for kind, call in calls.items():
        client = client_in(state)
        if (state, kind) in CLIENT_SENDS:
            call(client)
            assert client.state is CLIENT_SENDS[state, kind]
        else:
            with pytest.raises(ValueError, match=f"cannot send {kind.name}"):
                call(client)
            assert client.state is state


@pytest.mark.parametrize("wrong", [0, 2, 1 << 63])
def test_a_frame_of_another_request_is_refused(wrong: int) -> None:
    """A late answer to an earlier question cannot be taken for one to this."""
    client = client_in(ClientState.STREAMING)
    server = server_in(ServerState.AWAITING_ACK)

    for machine, kind in ((client, FrameType.COMPONENT), (server, FrameType.ACK)):
        with pytest.raises(ProtocolError, match="not 1"):
            machine.receive(header_of(kind, wrong))


def test_a_session_frame_carries_no_request() -> None:
    """BYE of request 1 is no BYE."""
    with pytest.raises(ProtocolError, match="not 0"):
        server_in(ServerState.READY).receive(header_of(FrameType.BYE, 1))


def test_requests_are_numbered_without_gaps() -> None:
    """A server notices a lost or repeated request."""
    for wrong in (0, 2):
        with pytest.raises(ProtocolError, match="not 1"):
            server_in(ServerState.READY).receive(header_of(FrameType.PULL, wrong))


@pytest.mark.parametrize(
    ("table", "states"),
    [(CLIENT_SENDS | CLIENT_RECEIVES, ClientState), (SERVER_SENDS | SERVER_RECEIVES, ServerState)],
    ids=["client", "server"],
)
def test_every_state_is_reachable_and_has_a_way_out(
    table: dict[tuple[Enum, FrameType], Enum], states: type[Enum]
) -> None:
    """Except those that end a session, or that only an event of our own leads to."""
    entered = set(table.values()) | {states["FRESH"]}
    left = {state for state, _ in table}
    by_own_event = {states["FAILED"]} | ({states["ABANDONED"]} if states is ClientState else set())

    assert set(states) - entered == by_own_event
    assert set(states) - left == {states["CLOSED"]} | (
        by_own_event if states is ClientState else set()
    )


def test_the_two_sides_agree() -> None:
    """Walk every conversation: nothing is said that would be refused, nobody waits in vain.

    A joint state is both machines and what is on its way each way.  A server may fail over
    any frame, and in the middle of a stream; it then says so.
    """
    start = (ClientState.FRESH, ServerState.FRESH, (), ())
    seen, todo = {start}, [start]
    while todo:
        client, server, to_server, to_client = here = todo.pop()
        following = []
        for (state, kind), after in CLIENT_SENDS.items():
            if state is client and len(to_server) < 3:
                following.append((after, server, (*to_server, kind), to_client))
        for (state, kind), after in SERVER_SENDS.items():
            if state is server and len(to_client) < 3:
                following.append((client, after, to_server, (*to_client, kind)))
        if any(state is client for state, _ in CLIENT_RECEIVES) and to_client:
            after = CLIENT_RECEIVES.get((client, to_client[0]))
            assert after is not None, here
            following.append((after, server, to_server, to_client[1:]))
        if any(state is server for state, _ in SERVER_RECEIVES) and to_server:
            after = SERVER_RECEIVES.get((server, to_server[0]))
            assert after is not None, here
            following.append((client, after, to_server[1:], to_client))
            following.append((client, ServerState.FAILED, to_server[1:], to_client))
        if server is ServerState.STREAMING:
            following.append((client, ServerState.FAILED, to_server, to_client))
        assert following or client is ClientState.CLOSED or server is ServerState.CLOSED, here
        fresh = [joint for joint in following if joint not in seen]
        seen.update(fresh)
        todo += fresh

    assert {joint[0] for joint in seen} == set(ClientState) - {
        ClientState.FAILED,
        ClientState.ABANDONED,
    }
    assert {joint[1] for joint in seen} == set(ServerState)
    assert len(seen) > 50
