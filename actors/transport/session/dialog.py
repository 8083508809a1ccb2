"""One side of a conversation: whole frames from fragments, states from tables.

Shared by client and server.  It knows the order of frames and their request ids, and
nothing of what they mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from actors.transport.frames import (
    HEADER_BYTES,
    Header,
    pack_frame,
    parse_header,
    parse_message,
)
from actors.transport.kinds import FrameType
from actors.transport.messages import Message
from codec.errors import ProtocolError

StateT = TypeVar("StateT", bound=Enum)

SESSION_TYPES = frozenset({FrameType.HELLO, FrameType.WELCOME, FrameType.ERROR, FrameType.BYE})
"""Speak of the session, and carry request id 0."""

OPENING_TYPES = frozenset({FrameType.PULL, FrameType.PING, FrameType.PROBE})
"""Open a request when the client says them; the next frames carry the same id."""


class Dialog(Generic[StateT]):
    """Applies the tables of one side to what is said and heard."""

    def __init__(
        self,
        *,
        peer: str,
        start: StateT,
        failed: StateT,
        sends: Mapping[tuple[StateT, FrameType], StateT],
        receives: Mapping[tuple[StateT, FrameType], StateT],
        is_client: bool,
    ) -> None:
        self.peer = peer
        self.state = start
        self._failed = failed
        self._sends = sends
        self._receives = receives
        self._is_client = is_client
        #: Id of the last request opened; rises by one.
        self._request_id = 0
        #: The header of the frame being received, once it is complete and legal here.
        self._header: Header | None = None
        #: Bytes of that header, or of its body, so far; always short of what is needed.
        self._partial = bytearray()

    @property
    def is_listening(self) -> bool:
        """Whether any frame at all may come in this state."""
        return any(state is self.state for state, _ in self._receives)

    @property
    def bytes_wanted(self) -> int:
        """Bytes that complete the header or body under way; 0 when not listening."""
        if not self.is_listening:
            return 0
        needed = HEADER_BYTES if self._header is None else self._header.control_bytes
        return needed - len(self._partial)

    def say(self, message: Message) -> bytes:
        """Move on as the table of sending says, and return the frame.

        Raises
        ------
        ValueError
            If our side may not say that now; nothing has changed.
        """
        after = self._sends.get((self.state, message.type))
        if after is None:
            raise ValueError(f"cannot send {message.type.name} when {self.state.value}")
        if self._is_client and message.type in OPENING_TYPES:
            self._request_id += 1
        self.state = after
        is_session = message.type in SESSION_TYPES
        return pack_frame(message, request_id=0 if is_session else self._request_id)

    def hear(self, data: bytes | bytearray | memoryview) -> Message | None:
        """Take at most `bytes_wanted` bytes; return the message they complete, if any.

        Raises
        ------
        ProtocolError
            If the frame is malformed or may not come now.  The dialog has then failed.
        ValueError
            If ``data`` is longer than `bytes_wanted`; nothing has changed.
        """
        if len(data) > self.bytes_wanted:
            raise ValueError(f"wanted {self.bytes_wanted} bytes, got {len(data)}")
        self._partial += data
        if self.bytes_wanted:
            return None
        try:
            return self._advance()
        except ProtocolError:
            self.fail()
            raise

    def fail(self) -> None:
        """Stop listening for good."""
        self.state = self._failed
        self._partial.clear()

    def refusal(self, why: str) -> ProtocolError:
        """Fail, and return the error to raise."""
        self.fail()
        return ProtocolError(self.peer, why)

    def _advance(self) -> Message | None:
        data = bytes(self._partial)
        self._partial.clear()
        if self._header is None:
            self._header = parse_header(data, peer=self.peer)
            self._check_turn(self._header)
            if self._header.control_bytes:
                return None
            data = b""
        header, self._header = self._header, None
        message = parse_message(header, data, peer=self.peer)
        self.state = self._receives[self.state, header.type]
        if not self._is_client and header.type in OPENING_TYPES:
            self._request_id += 1
        return message

    def _check_turn(self, header: Header) -> None:
        """Refuse a frame out of turn by its header, before its body is asked for."""
        if (self.state, header.type) not in self._receives:
            raise ProtocolError(self.peer, f"{header.type.name} when {self.state.value}")
        expected = self._request_id
        if header.type in SESSION_TYPES:
            expected = 0
        elif not self._is_client and header.type in OPENING_TYPES:
            expected += 1
        if header.request_id != expected:
            raise ProtocolError(
                self.peer, f"{header.type.name} of request {header.request_id}, not {expected}"
            )
