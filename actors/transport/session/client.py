"""The pulling side of a session, without I/O: frames in, instructions out.

1. ``greet``; WELCOME must echo our nonce and come from the start of the worker we mean.
2. ``pull``; for every want, in order, COMPONENT and PAYLOAD, or MISSING; then END.
3. Each payload is checked against its checksum when the link has received it; only then
   is the link told to commit.  Up to ``window`` payloads may be on their way at once.
4. When END has come and all are settled, ACK: the server lets go of the bytes.
5. Another request, or ``leave``.

It trusts nothing that the server says beyond the tables: indices, keys, sizes and totals
are compared with what was asked for.
"""

from __future__ import annotations

from actors.transport.frames import payload_checksum
from actors.transport.kinds import ANY_INCARNATION, ErrorCode
from actors.transport.messages import (
    Ack,
    Bye,
    Component,
    End,
    Error,
    Feature,
    Hello,
    Message,
    Missing,
    Payload,
    Ping,
    Probe,
    Pull,
    Want,
    Welcome,
)
from actors.transport.report import OUTCOME_OF_REASON, ComponentOutcome, Outcome
from actors.transport.session.dialog import Dialog
from actors.transport.session.instructions import (
    Close,
    Commit,
    Discard,
    Instruction,
    ReceivePayload,
    ReceiveProbe,
    Send,
)
from actors.transport.session.tables import CLIENT_RECEIVES, CLIENT_SENDS, ClientState
from codec.errors import FabricError, PeerLostError, StaleIncarnationError

DEFAULT_WINDOW = 4


class PullClient:
    """Decides what the pulling side says and does next."""

    def __init__(
        self,
        *,
        node: str,
        server_node: str,
        incarnation: int,
        nonce: bytes,
        features: tuple[Feature, ...] = (),
        window: int = DEFAULT_WINDOW,
    ) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        self._hello = Hello(node, incarnation, nonce, features)
        self._server_node = server_node
        self._window = window
        self._dialog = Dialog[ClientState](
            peer=server_node,
            start=ClientState.FRESH,
            failed=ClientState.FAILED,
            sends=CLIENT_SENDS,
            receives=CLIENT_RECEIVES,
            is_client=True,
        )
        #: Features that both sides have; known once READY.
        self.features: tuple[Feature, ...] = ()
        self._pull: Pull | None = None
        self._ping: Ping | None = None
        self._probe: Probe | None = None
        #: Wants ``[0, _num_heard)`` of the pull were announced or declared missing.
        self._num_heard = 0
        #: Sizes and checksums announced so far, by index.
        self._announced: dict[int, Component] = {}
        #: Payload bytes announced in this pull: what ``_announced`` adds up to.
        self.payload_bytes = 0
        #: Announced, and neither settled nor refused; at most ``_window`` of them.
        self._in_flight: set[int] = set()
        self._outcomes: dict[int, Outcome] = {}
        #: Payloads heard of in this session, probes included.
        self._num_payloads = 0

    @property
    def state(self) -> ClientState:
        """Where the conversation is."""
        return self._dialog.state

    @property
    def bytes_wanted(self) -> int:
        """How many bytes to read next; 0 while it is not the server's turn.

        It is also 0 while the window is full, so a link that obeys never has more than
        ``window`` payloads in flight.
        """
        return 0 if len(self._in_flight) >= self._window else self._dialog.bytes_wanted

    def want(self, index: int) -> Want:
        """Return what the pull under way asks for at ``index``."""
        if self._pull is None:
            raise ValueError("there is no pull under way")
        return self._pull.wants[index]

    def greet(self) -> Send:
        """Open the session."""
        return Send(self._dialog.say(self._hello))

    def pull(self, request: Pull) -> Send:
        """Ask for components; outcomes of an earlier pull are forgotten."""
        frame = self._dialog.say(request)
        self._pull = request
        self._num_heard = 0
        self.payload_bytes = 0
        self._announced.clear()
        self._outcomes.clear()
        return Send(frame)

    def ping(self, nonce: bytes) -> Send:
        """Ask for a sign of life."""
        ping = Ping(nonce)
        frame = self._dialog.say(ping)
        self._ping = ping
        return Send(frame)

    def probe(self, num_bytes: int) -> Send:
        """Ask for ``num_bytes`` of nothing."""
        probe = Probe(num_bytes)
        frame = self._dialog.say(probe)
        self._probe = probe
        return Send(frame)

    def leave(self) -> Send:
        """End the session politely; BYE must come back."""
        return Send(self._dialog.say(Bye()))

    def receive(self, data: bytes | bytearray | memoryview) -> list[Instruction]:
        """Take at most `bytes_wanted` bytes from the server.

        Raises
        ------
        ProtocolError
            If the server says anything it should not.
        StaleIncarnationError
            If the worker has restarted since the caller learned of it.
        PeerLostError
            If another node answers, or the server gives up.
        """
        message = self._dialog.hear(data)
        return [] if message is None else self._obey(message)

    def payload_received(self, index: int, payload: memoryview) -> list[Instruction]:
        """Say whether the payload of ``index``, now complete, may be committed."""
        self._need_in_flight(index)
        component = self._announced[index]
        if payload_checksum(payload) == component.checksum:
            return [Commit(index)]
        return [Discard(index), *self.settled(index, Outcome.CORRUPT)]

    def settled(self, index: int, outcome: Outcome) -> list[Instruction]:
        """Note what became of ``index``; the last one after END is followed by ACK."""
        self._need_in_flight(index)
        self._in_flight.discard(index)
        self._outcomes[index] = outcome
        return self._acknowledge()

    def no_room(self, index: int) -> None:
        """Note that the sink is full: hear nothing more, settle only what is in flight."""
        self._need_in_flight(index)
        self._in_flight.discard(index)
        self._outcomes[index] = Outcome.NO_ROOM
        self._dialog.state = ClientState.ABANDONED

    def outcomes(self) -> tuple[ComponentOutcome, ...]:
        """Outcome of every want of the last pull; those never reached had no room.

        Raises
        ------
        ValueError
            If the pull is still going on, or was broken off by an error.
        """
        wants = () if self._pull is None else self._pull.wants
        if len(self._outcomes) < len(wants) and self.state is not ClientState.ABANDONED:
            raise ValueError(f"the pull is not over when {self.state.value}")
        return tuple(
            ComponentOutcome(
                want.component,
                want.codec,
                self._outcomes.get(index, Outcome.NO_ROOM),
                self._announced[index].stored_bytes if index in self._announced else 0,
            )
            for index, want in enumerate(wants)
        )

    def check(self) -> None:
        """Assert every invariant.  For tests, not for control flow."""
        assert len(self._in_flight) <= self._window, self._in_flight
        assert self._in_flight <= self._announced.keys()
        assert not self._in_flight & self._outcomes.keys()
        assert self.payload_bytes == sum(c.stored_bytes for c in self._announced.values())
        assert all(index < self._num_heard for index in (*self._announced, *self._outcomes))
        if self.state is ClientState.READY and self._pull is not None and self._outcomes:
            assert len(self._outcomes) == len(self._pull.wants)

    def _need_in_flight(self, index: int) -> None:
        if index not in self._in_flight:
            raise ValueError(f"component {index} is not in flight")

    def _obey(self, message: Message) -> list[Instruction]:
        match message:
            case Welcome():
                return self._on_welcome(message)
            case Component() | Missing():
                return self._on_answer(message)
            case Payload():
                return self._on_payload(message)
            case End():
                return self._on_end(message)
            case Ping():
                return self._on_ping(message)
            case Error():
                raise self._error_from(message)
        return [Close()]  # BYE: the tables let nothing else through

    def _on_welcome(self, welcome: Welcome) -> list[Instruction]:
        if welcome.client_nonce != self._hello.nonce:
            raise self._dialog.refusal("WELCOME answers another HELLO")
        if welcome.node != self._server_node:
            self._dialog.fail()
            raise PeerLostError(self._server_node, f"node {welcome.node} answers in its place")
        wanted = self._hello.incarnation
        if wanted not in (ANY_INCARNATION, welcome.incarnation):
            self._dialog.fail()
            raise StaleIncarnationError(self._server_node, wanted, welcome.incarnation)
        if not {f.name for f in welcome.features} <= {f.name for f in self._hello.features}:
            raise self._dialog.refusal("WELCOME has features that were not offered")
        self.features = welcome.features
        return []

    def _on_answer(self, answer: Component | Missing) -> list[Instruction]:
        pull = self._pull
        index = self._num_heard
        if pull is None or answer.index != index or index >= len(pull.wants):
            raise self._dialog.refusal(f"component {answer.index} when {index} was due")
        if isinstance(answer, Missing):
            self._outcomes[index] = OUTCOME_OF_REASON[answer.reason]
        else:
            self._announce(answer, pull)
        self._num_heard += 1
        return []

    def _announce(self, component: Component, pull: Pull) -> None:
        if component.want != pull.wants[component.index]:
            raise self._dialog.refusal(f"component {component.index} is not the one wanted")
        if self.payload_bytes + component.stored_bytes > pull.max_bytes:
            raise self._dialog.refusal(f"more than the {pull.max_bytes} bytes allowed")
        self._announced[component.index] = component
        self.payload_bytes += component.stored_bytes

    def _on_payload(self, payload: Payload) -> list[Instruction]:
        ordinal = self._num_payloads
        if self._probe is not None:
            probe, self._probe = self._probe, None
            if payload.num_bytes != probe.num_bytes:
                raise self._dialog.refusal(f"asked for {probe.num_bytes}, got {payload}")
            self._num_payloads += 1
            return [ReceiveProbe(ordinal, payload.num_bytes)]
        index = self._num_heard - 1
        if payload.num_bytes != self._announced[index].stored_bytes:
            raise self._dialog.refusal(f"component {index} and its payload differ in size")
        self._num_payloads += 1
        self._in_flight.add(index)
        return [ReceivePayload(index, ordinal, payload.num_bytes)]

    def _on_end(self, end: End) -> list[Instruction]:
        pull = self._pull
        heard = (len(self._announced), self.payload_bytes)
        if pull is None or self._num_heard != len(pull.wants):
            raise self._dialog.refusal(f"END after {self._num_heard} answers")
        if heard != (end.num_components, end.payload_bytes):
            raise self._dialog.refusal(f"END speaks of {end}, heard {heard}")
        return self._acknowledge()

    def _on_ping(self, ping: Ping) -> list[Instruction]:
        asked, self._ping = self._ping, None
        if asked is None or ping != Ping(asked.nonce, is_reply=True):
            raise self._dialog.refusal("PING answers another PING")
        return []

    def _error_from(self, error: Error) -> FabricError:
        if error.code is ErrorCode.STALE_INCARNATION:
            return StaleIncarnationError(self._server_node, self._hello.incarnation, error.value)
        if error.code is ErrorCode.PROTOCOL:
            return self._dialog.refusal(f"it refuses what we said: {error.text}")
        return PeerLostError(self._server_node, f"it gave up: {error.text}")

    def _acknowledge(self) -> list[Instruction]:
        if self.state is not ClientState.SETTLING or self._in_flight:
            return []
        rejected = (i for i, outcome in self._outcomes.items() if outcome is Outcome.CORRUPT)
        return [Send(self._dialog.say(Ack(tuple(sorted(rejected)))))]
