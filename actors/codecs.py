"""The codecs that one worker has loaded, found by identity."""

from __future__ import annotations

import threading

from codec.codec import Codec
from codec.errors import UnknownCodecError
from codec.identity import CodecId


class CodecBank:
    """Loaded codecs.  Thread-safe; codecs themselves are immutable."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._lock = threading.Lock()
        #: Every codec under its own identity.
        self._codecs: dict[CodecId, Codec] = {}

    def add(self, codec: Codec) -> CodecId:
        """Load ``codec``; one that is loaded already stays as it is."""
        with self._lock:
            self._codecs.setdefault(codec.codec_id, codec)
        return codec.codec_id

    def find(self, codec_id: CodecId) -> Codec:
        """The codec of that identity.

        Raises
        ------
        UnknownCodecError
            If it is not loaded.
        """
        with self._lock:
            found = self._codecs.get(codec_id)
        if found is None:
            raise UnknownCodecError(codec_id.hex(), self._node)
        return found

    def loaded(self) -> tuple[CodecId, ...]:
        """Identities of all loaded codecs, sorted."""
        with self._lock:
            return tuple(sorted(self._codecs))
