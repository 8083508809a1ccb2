"""What an evaluation says of one set of codecs, as a quality receipt."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version

from codec.codec import Codec
from codec.quality_receipt import QualityReceipt
from fabric.evaluate.results import ArmResult, Evaluation


def make_receipt(
    codecs: Sequence[Codec], result: ArmResult, found: Evaluation, *, date: str | None = None
) -> QualityReceipt:
    """Receipt of ``codecs``, one per stage, used together; nobody has judged it yet.

    Parameters
    ----------
    result
        Of the arm that coded with them, out of ``found``.
    date
        ``YYYY-MM-DD``; today's by default.

    Raises
    ------
    ValueError
        If the evaluation was of the caller's own text.
    """
    if not found.is_registered:
        raise ValueError("only the pre-registered set makes a receipt")
    calibrations = [getattr(codec, "calibration", None) for codec in codecs]
    return QualityReceipt(
        codec_ids=tuple(codec.codec_id.hex() for codec in codecs),
        calibrations=tuple("" if one is None else one.digest.hex() for one in calibrations),
        namespace=found.namespace,
        stages=tuple(str(codec.stage) for codec in codecs),
        profile=codecs[0].name,
        target=1.0 if result.target is None else result.target,
        net_ratio=result.net_ratio,
        evaluation_set=found.evaluation_set,
        sets=result.sets,
        pooled=result.pooled,
        tool_version=version("kvfabric"),
        date=date or datetime.now(UTC).date().isoformat(),
    )
