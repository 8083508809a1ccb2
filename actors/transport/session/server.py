"""The serving side of a session, without I/O: frames in, instructions out.

It asks its link to open one component at a time, announces it with size and checksum, and
lets the next one follow without waiting; what was opened stays open until the client's
ACK.  A component that cannot be had is declared missing and the pull goes on.
"""

from __future__ import annotations

from actors.transport.frames import payload_checksum
from actors.transport.kinds import (
    ANY_INCARNATION,
    MAX_ERROR_BYTES,
    MAX_PAYLOAD_BYTES,
    ErrorCode,
    MissingReason,
)
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
from actors.transport.session.dialog import Dialog
from actors.transport.session.instructions import (
    Close,
    Instruction,
    OpenComponent,
    ReleasePins,
    Send,
    SendPayload,
)
from actors.transport.session.tables import SERVER_RECEIVES, SERVER_SENDS, ServerState
from codec.errors import ProtocolError, StaleIncarnationError


class PullServer:
    """Decides what the serving side says and does next."""

    def __init__(
        self,
        *,
        node: str,
        incarnation: int,
        nonce: bytes,
        features: tuple[Feature, ...] = (),
    ) -> None:
        self._node = node
        self._incarnation = incarnation
        self._nonce = nonce
        self._features = features
        self._dialog = Dialog[ServerState](
            peer="a client",
            start=ServerState.FRESH,
            failed=ServerState.FAILED,
            sends=SERVER_SENDS,
            receives=SERVER_RECEIVES,
            is_client=False,
        )
        self._wants: tuple[Want, ...] = ()
        self._max_bytes = 0
        #: Wants ``[0, _num_answered)`` were announced or declared missing.
        self._num_answered = 0
        #: Indices and sizes of what was announced in this pull.
        self._announced: dict[int, int] = {}
        #: What ``_announced`` adds up to; at most ``_max_bytes``.
        self._announced_bytes = 0
        #: Payloads sent in this session, probes included.
        self._num_payloads = 0

    @property
    def state(self) -> ServerState:
        """Where the conversation is."""
        return self._dialog.state

    @property
    def peer(self) -> str:
        """The client's node, once it has said so."""
        return self._dialog.peer

    @property
    def bytes_wanted(self) -> int:
        """How many bytes to read next; 0 while it is not the client's turn."""
        return self._dialog.bytes_wanted

    def receive(self, data: bytes | bytearray | memoryview) -> list[Instruction]:
        """Take at most `bytes_wanted` bytes from the client.

        Raises
        ------
        ProtocolError
            If the client says anything it should not.
        StaleIncarnationError
            If the client means another start of this worker.
        """
        message = self._dialog.hear(data)
        return [] if message is None else self._obey(message)

    def opened(self, view: memoryview) -> list[Instruction]:
        """Announce the component asked for last; its bytes are ``view``."""
        index, want = self._asked()
        if not view.nbytes:
            return self.missing(MissingReason.UNREADABLE)
        budget_bytes = self._max_bytes - self._announced_bytes
        if view.nbytes > min(budget_bytes, MAX_PAYLOAD_BYTES):
            return self.missing(MissingReason.OVER_LIMIT)
        component = Component(index, want, view.nbytes, payload_checksum(view))
        instructions: list[Instruction] = [Send(self._dialog.say(component))]
        self._announced[index] = view.nbytes
        self._announced_bytes += view.nbytes
        self._num_answered += 1
        return [*instructions, *self._payload(view), *self._continue()]

    def missing(self, reason: MissingReason) -> list[Instruction]:
        """Declare that the component asked for last does not come."""
        index, _ = self._asked()
        frame = self._dialog.say(Missing(index, reason))
        self._num_answered += 1
        return [Send(frame), *self._continue()]

    def farewell(self, error: Exception) -> list[Instruction]:
        """Give up, telling the client why; nothing if the session has already ended."""
        if self.state is ServerState.CLOSED:
            return []
        self._dialog.fail()
        return [Send(self._dialog.say(_error_message(error))), Close()]

    def check(self) -> None:
        """Assert every invariant.  For tests, not for control flow."""
        assert self._announced_bytes == sum(self._announced.values()) <= self._max_bytes
        assert self._num_answered <= len(self._wants)
        assert all(index < self._num_answered for index in self._announced)

    def _obey(self, message: Message) -> list[Instruction]:
        match message:
            case Hello():
                return self._on_hello(message)
            case Pull():
                self._wants, self._max_bytes = message.wants, message.max_bytes
                self._num_answered = 0
                self._announced.clear()
                self._announced_bytes = 0
                return self._continue()
            case Probe():
                return self._payload(memoryview(bytes(message.num_bytes)))
            case Ping():
                return self._on_ping(message)
            case Ack():
                return self._on_ack(message)
        return [Send(self._dialog.say(Bye())), Close()]  # the tables let only BYE through

    def _on_hello(self, hello: Hello) -> list[Instruction]:
        self._dialog.peer = hello.node
        if hello.incarnation not in (ANY_INCARNATION, self._incarnation):
            self._dialog.fail()
            raise StaleIncarnationError(self._node, hello.incarnation, self._incarnation)
        offered = {feature.name for feature in hello.features}
        shared = tuple(feature for feature in self._features if feature.name in offered)
        welcome = Welcome(self._node, self._incarnation, hello.nonce, self._nonce, shared)
        return [Send(self._dialog.say(welcome))]

    def _on_ping(self, ping: Ping) -> list[Instruction]:
        if ping.is_reply:
            raise self._dialog.refusal("PING answers a question that nobody asked")
        return [Send(self._dialog.say(Ping(ping.nonce, is_reply=True)))]

    def _on_ack(self, ack: Ack) -> list[Instruction]:
        if not self._announced.keys() >= set(ack.rejected):
            raise self._dialog.refusal("ACK rejects what was never sent")
        return [ReleasePins(tuple(self._wants[index] for index in ack.rejected))]

    def _asked(self) -> tuple[int, Want]:
        """Return the want that the link was told to open."""
        if self.state is not ServerState.STREAMING:
            raise ValueError(f"nothing was asked for when {self.state.value}")
        return self._num_answered, self._wants[self._num_answered]

    def _payload(self, view: memoryview) -> list[Instruction]:
        frame = self._dialog.say(Payload(view.nbytes))
        ordinal = self._num_payloads
        self._num_payloads += 1
        return [Send(frame), SendPayload(ordinal, view)]

    def _continue(self) -> list[Instruction]:
        """Ask for the next component, or end the stream."""
        index = self._num_answered
        if index < len(self._wants):
            return [OpenComponent(index, self._wants[index])]
        end = End(len(self._announced), self._announced_bytes)
        return [Send(self._dialog.say(end))]


def _error_message(error: Exception) -> Error:
    """Return what a client may know of ``error``: our own internals stay here."""
    if isinstance(error, StaleIncarnationError):
        return Error(ErrorCode.STALE_INCARNATION, error.found, "")
    if isinstance(error, ProtocolError):
        # Cut as bytes, since a limit in characters would not bound the frame.
        text = error.why.encode()[:MAX_ERROR_BYTES].decode(errors="ignore")
        return Error(ErrorCode.PROTOCOL, 0, text)
    return Error(ErrorCode.INTERNAL, 0, type(error).__name__)
