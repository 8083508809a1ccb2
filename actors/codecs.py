"""The codecs that one worker has loaded, found by identity; lossy ones only if they qualify.

A lossy codec qualifies by a receipt for exactly the codecs, one per stage, that it is used
with, judged here by this worker's own limits: the verdict in the receipt is not believed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from codec.codec import Codec
from codec.errors import UnknownCodecError, UnqualifiedCodecError
from codec.identity import CodecId
from codec.quality_receipt import QualityReceipt
from policies.quality_gate import QualityLimits, qualifies

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecOffer:
    """A codec for workers to load, with what speaks for it."""

    codec: Codec
    together: tuple[CodecId, ...]
    """The codecs of all stages that it is used with, itself included."""

    receipt: QualityReceipt | None
    allow_unqualified: bool


@dataclass(frozen=True, slots=True)
class Qualification:
    """What speaks for the codecs that a cache went through."""

    is_qualified: bool
    """Whether a receipt passes for them together, or none of them loses anything."""

    receipt: str | None
    """Digest, hex, of the receipt that passes."""


class CodecBank:
    """Loaded codecs.  Thread-safe; codecs themselves are immutable."""

    def __init__(self, node: str, limits: QualityLimits | None = None) -> None:
        self._node = node
        self._limits = limits or QualityLimits()
        self._lock = threading.Lock()
        #: Every codec under its own identity.
        self._codecs: dict[CodecId, Codec] = {}
        #: Receipts that passed, by the codecs that each is of.
        self._receipts: dict[tuple[CodecId, ...], QualityReceipt] = {}
        #: Who was let in without one; a codec may be here and qualify in other company.
        self._unqualified: set[tuple[CodecId, ...]] = set()

    def add(
        self,
        codec: Codec,
        receipt: QualityReceipt | None = None,
        *,
        allow_unqualified: bool = False,
        together: Sequence[CodecId] | None = None,
    ) -> CodecId:
        """Load ``codec``; one that is loaded already stays as it is.

        Parameters
        ----------
        receipt
            Of a lossy codec and those that it is used with; a lossless one needs none.
        allow_unqualified
            Load it even if no receipt passes, with a warning.
        together
            The codecs of all stages, this one included; it alone by default.

        Raises
        ------
        UnqualifiedCodecError
            If it is lossy, does not qualify, and that is not allowed; nothing changed then.
        """
        with self._lock:
            if not is_lossless(codec):
                company = tuple(together or (codec.codec_id,))
                self._admit(codec, company, receipt, allow_unqualified)
            self._codecs.setdefault(codec.codec_id, codec)
        return codec.codec_id

    def take(self, offers: Iterable[CodecOffer]) -> list[UnqualifiedCodecError]:
        """Load what is offered, by the rules of `add`; the refusals, which stop no other."""
        refusals = []
        for offer in offers:
            try:
                self.add(
                    offer.codec,
                    offer.receipt,
                    allow_unqualified=offer.allow_unqualified,
                    together=offer.together,
                )
            except UnqualifiedCodecError as error:
                _log.warning("%s", error)
                refusals.append(error)
        return refusals

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

    def qualification(self, codecs: Sequence[CodecId]) -> Qualification:
        """What speaks for a cache that went through ``codecs``, one per stage.

        Raises
        ------
        UnknownCodecError
            If one is not loaded.
        """
        if all(is_lossless(self.find(codec_id)) for codec_id in codecs):
            return Qualification(True, None)
        with self._lock:
            receipt = self._receipts.get(tuple(codecs))
        return Qualification(receipt is not None, None if receipt is None else receipt.digest())

    def _admit(
        self,
        codec: Codec,
        company: tuple[CodecId, ...],
        receipt: QualityReceipt | None,
        allow_unqualified: bool,
    ) -> None:
        """Note by what right a lossy codec is here, or refuse it."""
        if codec.codec_id not in company:
            raise ValueError(f"{codec.codec_id.hex()} is not among the codecs it is used with")
        if company in self._receipts:
            return
        verdict = qualifies(receipt, self._limits, codecs=company, namespace=codec.namespace)
        if receipt is not None and verdict.passes:
            self._receipts[company] = receipt
            self._unqualified.discard(company)
            return
        why = "; ".join(verdict.reasons)
        if not allow_unqualified:
            raise UnqualifiedCodecError(codec.codec_id.hex(), self._node, why)
        if company not in self._unqualified:
            self._unqualified.add(company)
            _log.warning(
                "%s: loading the lossy codec %s unqualified, as was allowed: %s",
                self._node,
                codec.codec_id.hex(),
                why,
            )


def is_lossless(codec: Codec) -> bool:
    """Whether what ``codec`` decodes is what it was given, bit for bit; no unless it says so."""
    return getattr(codec, "is_lossless", False) is True
