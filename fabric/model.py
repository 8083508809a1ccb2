"""A served model: its profile and codecs from an engine and calibrations, and who may use them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from actors.codecs import CodecBank, CodecOffer, is_lossless
from actors.profile import CodecSet, ModelProfile
from codec.codec import Codec
from codec.errors import CodecError, ConfigError, IdentityMismatchError
from codec.quality_receipt import QualityReceipt
from codec.raw import RawCodec
from fabric.calibrate.profiles import AnyCalibration, codec_of
from fabric.engines.protocol import Engine
from fabric.quality_store import find_receipt

_log = logging.getLogger(__name__)


def describe_model(
    engine: Engine[Any],
    calibrations: Sequence[AnyCalibration],
    *,
    name: str,
    tokens_per_chunk: int,
) -> tuple[ModelProfile, list[Codec]]:
    """Profile of a model with the codecs it lists for every stage.

    The first set is that of the calibrations, named for their codec (``entropy`` or ``kvtc``);
    the other is ``raw``.

    Raises
    ------
    ConfigError
        If the calibrations are of another model, of different profiles, or do not tile this
        one's layers.
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
    lossy = [codec_of(calibration, digest) for calibration in calibrations]
    if len(names := {codec.name for codec in lossy}) > 1:
        raise ConfigError(f"calibrations of all stages must be of one profile, got {sorted(names)}")
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
            for kind, codecs in ((lossy[0].name, lossy), (raw[0].name, raw))
        ),
    )
    return profile, [*lossy, *raw]


def lossy_sets(profile: ModelProfile, codecs: Sequence[Codec]) -> list[list[Codec]]:
    """The codecs of every way to store the model that loses something, in order of stages."""
    by_id = {codec.codec_id: codec for codec in codecs}
    sets = [[by_id[codec_id] for codec_id in kind.codecs] for kind in profile.codec_sets]
    return [kind for kind in sets if not all(map(is_lossless, kind))]


def offer_codecs(
    profile: ModelProfile,
    codecs: Sequence[Codec],
    receipts: Sequence[QualityReceipt] = (),
    *,
    allow_unqualified: bool = False,
) -> list[CodecOffer]:
    """What workers are to load, each with the receipt that speaks for it.

    It is checked here as every worker will check it, so that a model whose codecs would be
    refused is not registered at all.

    Parameters
    ----------
    receipts
        Of lossy codecs; those that are not among them are looked for in the store.

    Raises
    ------
    UnqualifiedCodecError
        If a lossy codec has no receipt that passes, and that is not allowed.
    CodecError
        If a receipt in the store cannot be used, and nothing else is allowed.
    """
    known = {receipt.codec_ids: receipt for receipt in receipts}
    offers = []
    for kind in profile.codec_sets:
        parts = [codec for codec in codecs if codec.codec_id in kind.codecs]
        receipt = known.get(tuple(codec_id.hex() for codec_id in kind.codecs))
        if receipt is None and not all(map(is_lossless, parts)):
            receipt = _kept_receipt(kind, allow_unqualified=allow_unqualified)
        offers += [
            CodecOffer(
                codec=codec,
                together=kind.codecs,
                receipt=receipt,
                allow_unqualified=allow_unqualified,
            )
            for codec in parts
        ]
    for refusal in CodecBank(f"model {profile.name}").take(offers):
        raise refusal
    return offers


def _kept_receipt(kind: CodecSet, *, allow_unqualified: bool) -> QualityReceipt | None:
    """The receipt in the store; one that cannot be used is none where none is needed."""
    try:
        return find_receipt(kind.codecs)
    except CodecError as error:
        if not allow_unqualified:
            raise
        _log.warning("the receipt of %s is of no use: %s", kind.name, error)
        return None


def check_engine(engine: Engine[Any], profile: ModelProfile) -> None:
    """Refuse an engine whose KV is not the registered model's, however alike its shape."""
    found = engine.namespace().digest()
    if found != profile.namespace:
        raise IdentityMismatchError("namespace", profile.namespace.hex(), found.hex())
