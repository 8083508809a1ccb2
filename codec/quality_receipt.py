"""A quality receipt: what one lossy codec was measured to change, in a form that can be checked.

It names the exact codecs, one per stage, that were used together, the digest of the texts
they were measured on, every figure with its interval, and the verdict with the limits it was
reached by.  As a file it is canonical JSON beside its own digest: a changed figure is found
unless the digest was computed anew, which a digest without a key cannot prevent.

Whether a receipt is good enough is decided elsewhere, in `policies.quality_gate`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any, TypeVar

from codec.errors import CorruptBlobError, UnsupportedVersionError
from codec.identity import DIGEST_BYTES, digest

RECEIPT_VERSION = 1
MAX_RECEIPT_BYTES = 1 << 20
"""A longer file is not read: nobody writes one."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with the ends of its confidence interval."""

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        for name in ("value", "low", "high"):
            object.__setattr__(self, name, float(getattr(self, name)))
        if not -math.inf < self.low <= self.value <= self.high < math.inf:
            raise ValueError(f"need finite low <= value <= high, got {self}")

    @classmethod
    def spanning(cls, value: float, low: float, high: float) -> Interval:
        """The interval, widened where rounding put an end on the wrong side of the value."""
        return cls(value, min(low, value), max(high, value))


@dataclass(frozen=True, slots=True, kw_only=True)
class SetResult:
    """What was measured on one evaluation set, or on all of them together."""

    name: str
    num_samples: int
    """Prompts; look-ups in a set that asks for keys."""

    num_tokens: int
    """Tokens scored against the full-precision cache."""

    mean_kl: Interval
    """Mean over tokens of KL(full precision || restored), nats."""

    top1: Interval
    """Share of tokens whose most likely next token is the same."""

    dppl_pct: Interval
    """Change of the perplexity of the following tokens, percent."""

    greedy_match: Interval | None = None
    """Share of greedy tokens before the first that differs; ``None`` where not measured."""

    retrieval: Interval | None = None
    """Share of key-value look-ups answered exactly; ``None`` where none was asked."""

    retrieval_reference: Interval | None = None
    """The same look-ups on the full-precision cache; beside every `retrieval`."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("an evaluation set needs a name")
        if self.num_samples < 1 or self.num_tokens < 1:
            raise ValueError(
                f"{self.name}: need at least one sample and one token, "
                f"got {self.num_samples} and {self.num_tokens}"
            )
        if (self.retrieval is None) != (self.retrieval_reference is None):
            raise ValueError(f"{self.name}: retrieval and its reference come together")
        _check_range(f"{self.name}.mean_kl", self.mean_kl, 0.0, math.inf)
        _check_range(f"{self.name}.dppl_pct", self.dppl_pct, -100.0, math.inf)
        for share in ("top1", "greedy_match", "retrieval", "retrieval_reference"):
            _check_range(f"{self.name}.{share}", getattr(self, share), 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a codec passes, and every reason why it does not."""

    passes: bool
    reasons: tuple[str, ...] = ()
    """Empty exactly if it passes."""

    def __post_init__(self) -> None:
        if self.passes == bool(self.reasons):
            raise ValueError(f"need reasons exactly where it does not pass, got {self}")


NOT_JUDGED = Verdict(False, ("not judged yet",))


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityReceipt:
    """What the codecs of all stages, used together, do to what a model says."""

    codec_ids: tuple[str, ...]
    """Hex, one per stage, in the order of the stages."""

    calibrations: tuple[str, ...]
    """Digests, hex, one per codec; empty text where a codec has none."""

    namespace: str
    """Digest, hex: the model whose cache was coded."""

    stages: tuple[str, ...]
    """Layer and head range of each codec."""

    profile: str
    """Kind of codec."""

    target: float
    """Compression the calibration aimed for; 1 where there was no aim."""

    net_ratio: float
    """Raw 16-bit bytes over stored bytes of the same tokens, everything counted."""

    evaluation_set: str
    """Digest, hex, of the texts and the protocol, fixed before anything was measured."""

    sets: tuple[SetResult, ...]
    pooled: SetResult
    tool_version: str
    date: str
    """``YYYY-MM-DD``, as the caller gave it."""

    limits: tuple[tuple[str, float], ...] = ()
    """What the verdict was reached by, by name; sorted."""

    verdict: Verdict = NOT_JUDGED
    format_version: int = RECEIPT_VERSION

    def __post_init__(self) -> None:
        for name in ("target", "net_ratio"):
            object.__setattr__(self, name, float(getattr(self, name)))
        limits = sorted((name, float(value)) for name, value in self.limits)
        object.__setattr__(self, "limits", tuple(limits))
        self._check_names()
        self._check_figures()

    def digest(self) -> str:
        """The receipt's own name, hex: of its content, verdict included."""
        return digest("kvfabric.quality_receipt.1", _canonical(self._fields())).hex()

    def to_json(self) -> str:
        """The receipt and its digest: equal receipts give equal text."""
        file = {"digest": self.digest(), "receipt": self._fields()}
        return json.dumps(file, sort_keys=True, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> QualityReceipt:
        """Read what `to_json` wrote, and nothing else.

        Raises
        ------
        CorruptBlobError
            If a field is missing, unknown, of the wrong type or out of range, or the digest
            is not that of the content.
        UnsupportedVersionError
            If another format version wrote it.
        """
        file = _fields_of(_parse(text), _WHERE, {"digest": _text, "receipt": _object})
        fields = file["receipt"]
        found = fields.get("format_version")
        if type(found) is int and found != RECEIPT_VERSION:
            raise UnsupportedVersionError(found, RECEIPT_VERSION)
        receipt = _made(cls, fields, _WHERE, _RECEIPT_FIELDS)
        if receipt.digest() != file["digest"]:
            raise CorruptBlobError(_WHERE, "the digest is not that of its content")
        return receipt

    def _check_names(self) -> None:
        if not self.codec_ids or len(set(self.codec_ids)) != len(self.codec_ids):
            raise ValueError(f"need one or more different codecs, got {self.codec_ids}")
        if not len(self.codec_ids) == len(self.calibrations) == len(self.stages):
            raise ValueError(
                f"need a calibration and a stage for each of {len(self.codec_ids)} codecs, "
                f"got {len(self.calibrations)} and {len(self.stages)}"
            )
        calibrations = filter(None, self.calibrations)
        for name in (*self.codec_ids, *calibrations, self.namespace, self.evaluation_set):
            _check_hex(name)
        if not all((*self.stages, self.profile, self.tool_version)):
            raise ValueError("stages, profile and tool_version must not be empty")
        if self.date != date.fromisoformat(self.date).isoformat():
            raise ValueError(f"date must be YYYY-MM-DD, got {self.date!r}")

    def _check_figures(self) -> None:
        if self.format_version != RECEIPT_VERSION:
            raise ValueError(f"format_version must be {RECEIPT_VERSION}, got {self.format_version}")
        for name in ("target", "net_ratio"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        names = [result.name for result in self.sets]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"need evaluation sets of different names, got {names}")
        limit_names = {name for name, _ in self.limits}
        if len(limit_names) != len(self.limits) or not all(
            math.isfinite(value) for _, value in self.limits
        ):
            raise ValueError(f"limits must be finite and named once, got {self.limits}")

    def _fields(self) -> dict[str, Any]:
        return asdict(self) | {"limits": dict(self.limits)}


_WHERE = "quality receipt"
Parser = Callable[[Any, str], Any]
MadeT = TypeVar("MadeT")


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _check_range(name: str, interval: Interval | None, least: float, most: float) -> None:
    if interval is not None and not least <= interval.low <= interval.high <= most:
        raise ValueError(f"{name} must be in [{least:g}, {most:g}], got {interval}")


def _check_hex(name: str) -> None:
    if len(name) != 2 * DIGEST_BYTES or set(name) - set("0123456789abcdef"):
        raise ValueError(f"need {2 * DIGEST_BYTES} lower-case hex digits, got {name!r}")


def _parse(text: str | bytes) -> Any:  # noqa: ANN401 - any JSON
    if len(text) > MAX_RECEIPT_BYTES:
        raise CorruptBlobError(_WHERE, f"over {MAX_RECEIPT_BYTES} bytes")
    try:
        return json.loads(text, object_pairs_hook=_no_twins, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptBlobError(_WHERE, f"not JSON: {error}") from error


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name appears twice in one object")
    return made


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _fields_of(value: object, where: str, parsers: Mapping[str, Parser]) -> dict[str, Any]:
    """Every field parsed; none may be missing and none may be unknown."""
    fields = _object(value, where)
    if fields.keys() != parsers.keys():
        wrong = ", ".join(sorted(fields.keys() ^ parsers.keys()))
        raise CorruptBlobError(where, f"missing or unknown fields: {wrong}")
    return {name: parse(fields[name], f"{where}, {name}") for name, parse in parsers.items()}


def _made(
    cls: Callable[..., MadeT], value: object, where: str, parsers: Mapping[str, Parser]
) -> MadeT:
    fields = _fields_of(value, where, parsers)
    try:
        return cls(**fields)
    except ValueError as error:
        raise CorruptBlobError(where, str(error)) from error


def _typed(kind: type) -> Parser:
    def parse(value: object, where: str) -> object:
        # Exactly that type: True is an int to Python, and 8 is not what we write for 8.0.
        if type(value) is not kind:
            raise CorruptBlobError(where, f"must be {kind.__name__}, got {value!r:.80}")
        return value

    return parse


def _list_of(item: Parser) -> Parser:
    def parse(value: object, where: str) -> tuple[Any, ...]:
        return tuple(item(one, where) for one in _typed(list)(value, where))

    return parse


def _made_from(cls: Callable[..., Any], parsers: Mapping[str, Parser]) -> Parser:
    return lambda value, where: _made(cls, value, where, parsers)


def _or_none(parse: Parser) -> Parser:
    return lambda value, where: None if value is None else parse(value, where)


def _limits(value: object, where: str) -> tuple[tuple[str, float], ...]:
    return tuple((name, _number(limit, where)) for name, limit in _object(value, where).items())


_object, _text, _number, _count = _typed(dict), _typed(str), _typed(float), _typed(int)
_texts = _list_of(_text)
_interval = _made_from(Interval, {"value": _number, "low": _number, "high": _number})
_set_result = _made_from(
    SetResult,
    {
        "name": _text,
        "num_samples": _count,
        "num_tokens": _count,
        "mean_kl": _interval,
        "top1": _interval,
        "dppl_pct": _interval,
        "greedy_match": _or_none(_interval),
        "retrieval": _or_none(_interval),
        "retrieval_reference": _or_none(_interval),
    },
)
_RECEIPT_FIELDS: Mapping[str, Parser] = {
    "codec_ids": _texts,
    "calibrations": _texts,
    "namespace": _text,
    "stages": _texts,
    "profile": _text,
    "target": _number,
    "net_ratio": _number,
    "evaluation_set": _text,
    "sets": _list_of(_set_result),
    "pooled": _set_result,
    "tool_version": _text,
    "date": _text,
    "limits": _limits,
    "verdict": _made_from(Verdict, {"passes": _typed(bool), "reasons": _texts}),
    "format_version": _count,
}
