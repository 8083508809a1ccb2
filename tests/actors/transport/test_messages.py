"""Messages: one outside the protocol's limits cannot be built."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from actors.transport import kinds
from actors.transport import messages as m
from codec.geometry import Stage
from codec.identity import ChunkKey, CodecId, ComponentKey
from tests.actors.transport.samples import CODEC, STAGE, key, want

NONCE = bytes(kinds.NONCE_BYTES)
CHECKSUM = bytes(kinds.CHECKSUM_BYTES)


def many_features(count: int) -> tuple[m.Feature, ...]:
    """Distinct features, in order."""
    return tuple(m.Feature(f"f{index:03}") for index in range(count))


BREACHES: dict[str, Callable[[], object]] = {
    "no node": lambda: m.Hello("", 1, NONCE),
    "long node": lambda: m.Hello("n" * (kinds.MAX_NODE_BYTES + 1), 1, NONCE),
    "short nonce": lambda: m.Hello("n", 1, NONCE[1:]),
    "negative incarnation": lambda: m.Hello("n", -1, NONCE),
    "huge incarnation": lambda: m.Welcome("n", 1 << 64, NONCE, NONCE),
    "short client nonce": lambda: m.Welcome("n", 1, NONCE[1:], NONCE),
    "short server nonce": lambda: m.Welcome("n", 1, NONCE, NONCE[1:]),
    "too many features": lambda: m.Hello("n", 1, NONCE, many_features(kinds.MAX_FEATURES + 1)),
    "unordered features": lambda: m.Hello("n", 1, NONCE, many_features(2)[::-1]),
    "a feature twice": lambda: m.Welcome("n", 1, NONCE, NONCE, many_features(1) * 2),
    "long feature": lambda: m.Feature("f", bytes(kinds.MAX_FEATURE_BYTES + 1)),
    "unnamed feature": lambda: m.Feature(""),
    "no wants": lambda: m.Pull((), 1),
    "a want twice": lambda: m.Pull((want(1), want(1)), 1),
    "too many wants": lambda: m.Pull(tuple(want(i) for i in range(kinds.MAX_WANTS + 1)), 1),
    "negative limit": lambda: m.Pull((want(1),), -1),
    "short chunk key": lambda: m.Want(ComponentKey(ChunkKey(b"abc"), STAGE), CODEC),
    "short codec": lambda: m.Want(key(1), CodecId(b"abc")),
    "no class": lambda: m.Want(ComponentKey(key(1).chunk_key, STAGE, ""), CODEC),
    "huge layer": lambda: m.Want(ComponentKey(key(1).chunk_key, Stage(0, 1 << 32, 0, 1)), CODEC),
    "huge head": lambda: m.Want(ComponentKey(key(1).chunk_key, Stage(0, 1, 0, 1 << 32)), CODEC),
    "empty component": lambda: m.Component(0, want(0), 0, CHECKSUM),
    "huge component": lambda: m.Component(0, want(0), kinds.MAX_PAYLOAD_BYTES + 1, CHECKSUM),
    "short checksum": lambda: m.Component(0, want(0), 1, CHECKSUM[1:]),
    "negative index": lambda: m.Component(-1, want(0), 1, CHECKSUM),
    "empty payload": lambda: m.Payload(0),
    "huge payload": lambda: m.Payload(kinds.MAX_PAYLOAD_BYTES + 1),
    "huge index": lambda: m.Missing(1 << 16, kinds.MissingReason.UNKNOWN),
    "huge count": lambda: m.End(1 << 16, 0),
    "negative total": lambda: m.End(1, -1),
    "falling rejects": lambda: m.Ack((2, 1)),
    "a reject twice": lambda: m.Ack((1, 1)),
    "huge reject": lambda: m.Ack((1 << 16,)),
    "too many rejects": lambda: m.Ack(tuple(range(kinds.MAX_WANTS + 1))),
    "long complaint": lambda: m.Error(kinds.ErrorCode.PROTOCOL, 0, "x" * 257),
    "negative value": lambda: m.Error(kinds.ErrorCode.PROTOCOL, -1, ""),
    "short ping": lambda: m.Ping(NONCE[1:]),
    "empty probe": lambda: m.Probe(0),
    "huge probe": lambda: m.Probe(kinds.MAX_PROBE_BYTES + 1),
}


@pytest.mark.parametrize("build", BREACHES.values(), ids=BREACHES.keys())
def test_a_message_over_a_limit_cannot_be_built(build: Callable[[], object]) -> None:
    """So no frame over a limit can be sent, and parsing checks by building."""
    with pytest.raises(ValueError, match=r"need|must|takes|names"):
        build()


def test_the_limits_themselves_are_allowed() -> None:
    """Each just fits."""
    m.Hello("n" * kinds.MAX_NODE_BYTES, (1 << 64) - 1, NONCE, many_features(kinds.MAX_FEATURES))
    m.Pull(tuple(want(i) for i in range(kinds.MAX_WANTS)), (1 << 64) - 1)
    m.Component(kinds.MAX_WANTS - 1, want(0), kinds.MAX_PAYLOAD_BYTES, CHECKSUM)
    m.Probe(kinds.MAX_PROBE_BYTES)
    m.Ack(tuple(range(kinds.MAX_WANTS)))
