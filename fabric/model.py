"""A served model: its profile and codecs from an engine and calibrations, and who may use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.profile import CodecSet, ModelProfile
from codec.calibration import Calibration
from codec.codec import Codec
from codec.errors import ConfigError, IdentityMismatchError
from codec.kvtc import KvtcCodec
from codec.raw import RawCodec
from fabric.engines.protocol import Engine


def describe_model(
    engine: Engine[Any], calibrations: Sequence[Calibration], *, name: str, tokens_per_chunk: int
) -> tuple[ModelProfile, list[Codec]]:
    """Profile of a model with the codecs it lists, ``kvtc`` and ``raw`` for every stage.

    Raises
    ------
    ConfigError
        If the calibrations are of another model, or do not tile this one's layers.
    """
    namespace = engine.namespace()
    digest = namespace.digest()
    stages = tuple(calibration.stage for calibration in calibrations)
    if stages != engine.geometry.split_layers(len(stages) or 1):
        raise ConfigError(f"calibrations must cover {engine.geometry.whole}, got {stages}")
    for calibration in calibrations:
        if calibration.provenance.get("namespace") != digest.hex():
            raise ConfigError(
                f"calibration {calibration.digest.hex()} is of another model or dtype; "
                "run `kvfabric calibrate` for this one"
            )
    kvtc = [KvtcCodec(calibration, namespace=digest) for calibration in calibrations]
    raw = [
        RawCodec(stage, engine.geometry.of_stage(stage), namespace.dtype, namespace=digest)
        for stage in stages
    ]
    profile = ModelProfile(
        name=name,
        namespace=digest,
        geometry=engine.geometry,
        dtype=namespace.dtype,
        tokens_per_chunk=tokens_per_chunk,
        stages=stages,
        codec_sets=tuple(
            CodecSet(name=kind, codecs=tuple(codec.codec_id for codec in codecs))
            for kind, codecs in (("kvtc", kvtc), ("raw", raw))
        ),
    )
    return profile, [*kvtc, *raw]


def check_engine(engine: Engine[Any], profile: ModelProfile) -> None:
    """Refuse an engine whose KV is not the registered model's, however alike its shape."""
    found = engine.namespace().digest()
    if found != profile.namespace:
        raise IdentityMismatchError("namespace", profile.namespace.hex(), found.hex())
