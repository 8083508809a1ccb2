"""Where quality receipts lie on this machine.

Receipts lie in the user's cache directory beside the calibrations, each under the names of
the codecs that it is of: one codec's own, or a digest of those of all stages.  A file that is
there is whole, and it is read with the suspicion that any file deserves.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from codec.errors import CorruptBlobError, IdentityMismatchError
from codec.identity import CodecId, digest
from codec.quality_receipt import MAX_RECEIPT_BYTES, QualityReceipt
from fabric.engines.loading import cache_directory


def receipt_path(codecs: Sequence[CodecId]) -> Path:
    """Where the receipt of ``codecs``, one per stage, used together, lies or would lie."""
    name = codecs[0] if len(codecs) == 1 else digest("kvfabric.codecs.1", *codecs)
    return cache_directory().parent / "receipts" / f"{name.hex()}.json"


def save_receipt(receipt: QualityReceipt) -> Path:
    """Keep ``receipt`` in place of an earlier one; where it lies."""
    path = receipt_path([CodecId(bytes.fromhex(name)) for name in receipt.codec_ids])
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        partial.write_text(receipt.to_json(), encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def find_receipt(codecs: Sequence[CodecId]) -> QualityReceipt | None:
    """The receipt kept for ``codecs``, whatever its verdict; ``None`` if there is none.

    Raises
    ------
    CorruptBlobError
        If the file was damaged or changed.
    IdentityMismatchError
        If it is the receipt of other codecs.
    UnsupportedVersionError
        If another format version wrote it.
    """
    path = receipt_path(codecs)
    try:
        with path.open("rb") as file:
            text = file.read(MAX_RECEIPT_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CorruptBlobError(f"quality receipt {path}", str(error)) from error
    receipt = QualityReceipt.from_json(text)
    wanted = tuple(codec.hex() for codec in codecs)
    if receipt.codec_ids != wanted:
        raise IdentityMismatchError("codec", " + ".join(wanted), " + ".join(receipt.codec_ids))
    return receipt
