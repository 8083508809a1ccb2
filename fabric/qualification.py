"""What has to be true of a model's codecs before it is served: kept receipts, or measured now.

Whoever starts a fabric with a model of their own asks here first.  Registering the model looks
for the same receipts and would refuse without them; it never measures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from codec.codec import Codec
from codec.errors import FabricError
from codec.quality_receipt import QualityReceipt
from fabric import evaluate
from fabric.calibrate import AnyCalibration, Progress
from fabric.engines.loading import LoadedModel
from fabric.engines.protocol import Engine
from fabric.model import describe_model, lossy_sets, offer_codecs
from fabric.quality_store import find_receipt, receipt_path, save_receipt
from policies.quality_gate import QualityLimits, judged


def qualify_codecs(
    engine: Engine[Any],
    loaded: LoadedModel,
    calibrations: Sequence[AnyCalibration],
    *,
    tokens_per_chunk: int,
    allow_unqualified: bool,
    on_progress: Progress,
    say: Callable[[str], None],
) -> list[QualityReceipt]:
    """The receipts that registering the model will ask for, kept or made now.

    With ``allow_unqualified`` nothing is measured: what is kept counts, and nothing else.

    Raises
    ------
    UnqualifiedCodecError
        If a codec does not pass, and that is not allowed.
    """
    profile, codecs = describe_model(
        engine, calibrations, name=loaded.name, tokens_per_chunk=tokens_per_chunk
    )
    receipts = []
    if not allow_unqualified:
        receipts = [
            find_or_measure(engine, loaded, kind, on_progress=on_progress, say=say)
            for kind in lossy_sets(profile, codecs)
        ]
    offer_codecs(profile, codecs, receipts, allow_unqualified=allow_unqualified)
    return receipts


def find_or_measure(
    engine: Engine[Any],
    loaded: LoadedModel,
    codecs: Sequence[Codec],
    *,
    on_progress: Progress,
    say: Callable[[str], None],
) -> QualityReceipt:
    """The receipt kept for ``codecs``, or that of a quick evaluation made now and kept.

    A receipt that does not pass is not measured again: the answer would be the same.
    """
    ids = [codec.codec_id for codec in codecs]
    try:
        if (found := find_receipt(ids)) is not None:
            return found
    except FabricError as error:
        say(f"the quality receipt {receipt_path(ids)} is of no use ({error})")
    say("no quality receipt for this codec yet: measuring it, once")
    receipt = judged(evaluate.qualify(engine, loaded, codecs, on_progress), QualityLimits())
    say(f"quality receipt {receipt.digest()} is kept in {save_receipt(receipt)}")
    return receipt
