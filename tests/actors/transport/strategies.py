"""Hypothesis strategies for everything the protocol can say."""

from __future__ import annotations

from hypothesis import strategies as st

from actors.transport import kinds
from actors.transport import messages as m
from codec.geometry import Stage
from codec.identity import ChunkKey, CodecId, ComponentKey


def exactly(num_bytes: int) -> st.SearchStrategy[bytes]:
    """Byte strings of one length."""
    return st.binary(min_size=num_bytes, max_size=num_bytes)


def uint(num_bytes: int) -> st.SearchStrategy[int]:
    """Unsigned integers, ends included."""
    return st.integers(0, (1 << 8 * num_bytes) - 1)


def text(most: int, *, least: int = 1) -> st.SearchStrategy[str]:
    """Text of at most ``most`` bytes of UTF-8."""
    alphabet = st.characters(codec="utf-8")
    return st.text(alphabet, min_size=least, max_size=most).filter(
        lambda value: len(value.encode()) <= most
    )


@st.composite
def stages(draw: st.DrawFn) -> Stage:
    """Layer and head ranges up to the width of their field."""
    layers = sorted(draw(st.sets(uint(4), min_size=2, max_size=2)))
    heads = sorted(draw(st.sets(uint(4), min_size=2, max_size=2)))
    return Stage(*layers, *heads)


wants = st.builds(
    m.Want,
    st.builds(
        ComponentKey,
        exactly(16).map(ChunkKey),
        stages(),
        text(kinds.MAX_CLASS_BYTES),
    ),
    exactly(16).map(CodecId),
)
features = st.lists(
    st.builds(
        m.Feature,
        text(kinds.MAX_FEATURE_NAME_BYTES),
        st.binary(max_size=kinds.MAX_FEATURE_BYTES),
    ),
    max_size=kinds.MAX_FEATURES,
    unique_by=lambda feature: feature.name,
).map(lambda found: tuple(sorted(found, key=lambda feature: feature.name)))
nodes = text(kinds.MAX_NODE_BYTES)
nonces = exactly(kinds.NONCE_BYTES)
payload_sizes = st.integers(1, kinds.MAX_PAYLOAD_BYTES)

control_messages: st.SearchStrategy[m.Message] = st.one_of(
    st.builds(m.Hello, nodes, uint(8), nonces, features),
    st.builds(m.Welcome, nodes, uint(8), nonces, nonces, features),
    st.builds(m.Pull, st.lists(wants, min_size=1, max_size=8, unique=True).map(tuple), uint(8)),
    st.builds(m.Component, uint(2), wants, payload_sizes, exactly(kinds.CHECKSUM_BYTES)),
    st.builds(m.Missing, uint(2), st.sampled_from(kinds.MissingReason)),
    st.builds(m.End, uint(2), uint(8)),
    st.builds(m.Ack, st.sets(uint(2), max_size=20).map(lambda found: tuple(sorted(found)))),
    st.builds(
        m.Error, st.sampled_from(kinds.ErrorCode), uint(8), text(kinds.MAX_ERROR_BYTES, least=0)
    ),
    st.just(m.Bye()),
    st.builds(m.Ping, nonces, st.booleans()),
    st.builds(m.Probe, st.integers(1, kinds.MAX_PROBE_BYTES)),
)
messages: st.SearchStrategy[m.Message] = st.one_of(
    control_messages, st.builds(m.Payload, payload_sizes)
)
