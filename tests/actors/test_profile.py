"""`ModelProfile` and `CodecBank`: names that resolve, and refusals where they do not."""

from __future__ import annotations

import pytest

from actors.codecs import CodecBank
from actors.naming import ROUTER, is_fabric_actor, worker_actor_name
from actors.priors import cold_latency_model
from actors.profile import CodecSet, ModelProfile
from codec.errors import UnknownCodecError
from codec.identity import CodecId, Digest
from codec.raw import RawCodec
from policies.latency import CONNECT, TRANSFER
from policies.planner import DECODE_STEPS
from policies.residency.keys import chunk_keys
from tests.codec.synthetic import GEOMETRY, NAMESPACE


def a_profile(num_codecs: int = 2) -> ModelProfile:
    """A model in two stages."""
    codecs = tuple(CodecId(bytes([n]) * 16) for n in range(num_codecs))
    return ModelProfile(
        name="m",
        namespace=Digest(NAMESPACE),
        geometry=GEOMETRY,
        dtype="float32",
        tokens_per_chunk=4,
        stages=GEOMETRY.split_layers(2),
        codec_sets=(CodecSet(name="kvtc", codecs=codecs), CodecSet(name="raw", codecs=codecs)),
    )


def test_a_prefix_has_the_keys_of_its_whole_chunks() -> None:
    """Named within the model's namespace."""
    prefix = a_profile().prefix([1, 2, 3, 4, 5, 6, 7, 8, 9])

    assert list(prefix.keys) == chunk_keys(Digest(NAMESPACE), range(1, 9), tokens_per_chunk=4)
    assert prefix.tokens == (1, 2, 3, 4, 5, 6, 7, 8, 9)


def test_codec_sets_are_found_by_name_with_their_steps() -> None:
    """The raw codec has no transform to undo."""
    profile = a_profile()

    assert profile.codec_set("kvtc").steps == DECODE_STEPS
    assert profile.codec_set("raw").steps == ("verify", "handoff")
    with pytest.raises(KeyError):
        profile.codec_set("zip")


def test_a_codec_set_needs_a_codec_per_stage() -> None:
    """Half a way to store a model is none."""
    with pytest.raises(ValueError, match="needs 2 codecs, got 1"):
        a_profile(num_codecs=1)


def test_a_bank_finds_what_was_added_and_names_what_was_not() -> None:
    """Adding twice changes nothing."""
    codec = RawCodec(GEOMETRY.whole, GEOMETRY, "float32")
    bank = CodecBank("a.gpu0")

    assert bank.add(codec) == bank.add(codec) == codec.codec_id
    assert bank.find(codec.codec_id) is codec
    assert bank.loaded() == (codec.codec_id,)
    with pytest.raises(UnknownCodecError, match=r"a\.gpu0"):
        bank.find(CodecId(b"x" * 16))


def test_the_fabrics_actors_are_told_from_others() -> None:
    """`down` ends these and no others."""
    assert is_fabric_actor(ROUTER)
    assert is_fabric_actor(worker_actor_name("host.gpu3"))
    assert not is_fabric_actor("routers")
    assert not is_fabric_actor("somebody")


def test_every_step_of_a_plan_has_a_prior() -> None:
    """A step that could not be predicted would stop every plan."""
    model = cold_latency_model()

    for step in (*DECODE_STEPS, CONNECT, TRANSFER):
        assert model.predict(step, "anywhere", 1 << 20).seconds > 0
    assert model.predict_prefill("any", 0, 1000).seconds > 1
