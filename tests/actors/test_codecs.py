"""`CodecBank`: lossless codecs come in as they are, lossy ones with a receipt or a permission."""

from __future__ import annotations

import logging

import pytest

from actors.codecs import CodecBank, CodecOffer, Qualification, is_lossless
from codec.codec import Codec
from codec.errors import UnknownCodecError, UnqualifiedCodecError
from codec.identity import CodecId
from codec.kvtc import KvtcCodec
from codec.quality_receipt import Verdict
from codec.raw import RawCodec
from policies.quality_gate import QualityLimits
from tests.codec.quality_samples import a_set, flat, receipt_of
from tests.codec.synthetic import GEOMETRY, NAMESPACE, calibrated

RAW = RawCodec(GEOMETRY.whole, GEOMETRY, "float32")


@pytest.fixture(scope="module")
def codec() -> KvtcCodec:
    """A lossy codec of the whole model."""
    return KvtcCodec(calibrated(num_windows=4), namespace=NAMESPACE)


@pytest.fixture(scope="module")
def stages() -> list[KvtcCodec]:
    """Lossy codecs of two stages."""
    return [KvtcCodec(calibrated(stage=stage, num_windows=4)) for stage in GEOMETRY.split_layers(2)]


def refusal(bank: CodecBank, codec: Codec, *args: object, **options: object) -> str:
    """Why ``bank`` does not take ``codec``; nothing changed by that."""
    before = bank.loaded()
    with pytest.raises(UnqualifiedCodecError) as caught:
        bank.add(codec, *args, **options)  # type: ignore[arg-type]
    assert bank.loaded() == before
    assert caught.value.codec == codec.codec_id.hex()
    return str(caught.value)


def test_what_loses_nothing_needs_no_receipt(codec: KvtcCodec) -> None:
    """And whatever does not say so is lossy."""
    bank = CodecBank("a")

    bank.add(RAW)

    assert is_lossless(RAW)
    assert not is_lossless(codec)
    assert bank.qualification([RAW.codec_id]) == Qualification(True, None)


def test_a_lossy_codec_without_a_receipt_is_refused(codec: KvtcCodec) -> None:
    """With what to do about it."""
    why = refusal(CodecBank("node-7"), codec)

    assert "node-7" in why
    assert "there is no receipt" in why
    assert "kvfabric evaluate" in why
    assert "--allow-unqualified" in why


def test_a_passing_receipt_lets_a_lossy_codec_in(codec: KvtcCodec) -> None:
    """It is kept for the receipts of restores."""
    bank = CodecBank("a")
    receipt = receipt_of(codec)

    bank.add(codec, receipt)

    assert bank.find(codec.codec_id) is codec
    assert bank.qualification([codec.codec_id]) == Qualification(True, receipt.digest())
    bank.add(codec)


def test_a_receipt_that_does_not_pass_lets_nothing_in(codec: KvtcCodec) -> None:
    """Whatever it says of itself."""
    bad = receipt_of(codec, pooled=a_set("pooled", mean_kl=flat(0.5)), verdict=Verdict(True))

    assert "mean KL 0.5" in refusal(CodecBank("a"), codec, bad)


def test_limits_are_the_workers_own(codec: KvtcCodec) -> None:
    """A stricter worker refuses what another takes."""
    strict = QualityLimits(max_mean_kl=0.001)

    assert "over 0.001" in refusal(CodecBank("a", strict), codec, receipt_of(codec))


def test_a_receipt_of_another_target_is_refused(codec: KvtcCodec) -> None:
    """The same model, calibrated for another compression, is another codec."""
    other = KvtcCodec(calibrated(num_windows=4, target=8.0), namespace=NAMESPACE)

    assert "the receipt is of" in refusal(CodecBank("a"), codec, receipt_of(other))


def test_a_receipt_of_another_model_is_refused(codec: KvtcCodec) -> None:
    """Named for the codec, measured elsewhere."""
    elsewhere = receipt_of(codec, namespace="ff" * 16)

    assert "of model ffff" in refusal(CodecBank("a"), codec, elsewhere)


def test_an_unqualified_codec_is_let_in_where_that_is_allowed_with_one_warning(
    codec: KvtcCodec, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers load what they have again and again; the log says it once."""
    bank = CodecBank("node-7")

    with caplog.at_level(logging.WARNING):
        bank.add(codec, allow_unqualified=True)
        bank.add(codec, allow_unqualified=True)

    assert bank.loaded() == (codec.codec_id,)
    assert bank.qualification([codec.codec_id]) == Qualification(False, None)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "node-7" in caplog.text
    assert "there is no receipt" in caplog.text


def test_permission_once_is_no_permission_for_ever(codec: KvtcCodec) -> None:
    """Whoever asks without it is told; what is loaded stays for those who have it."""
    bank = CodecBank("a")
    bank.add(codec, allow_unqualified=True)

    refusal(bank, codec)

    assert bank.find(codec.codec_id) is codec


def test_a_codec_qualifies_later(codec: KvtcCodec) -> None:
    """The receipt may come after the codec."""
    bank = CodecBank("a")
    bank.add(codec, allow_unqualified=True)

    bank.add(codec, receipt_of(codec))

    assert bank.qualification([codec.codec_id]).is_qualified


def test_stages_qualify_together_and_not_alone(stages: list[KvtcCodec]) -> None:
    """What they do to the model was measured with both at work."""
    bank = CodecBank("a")
    receipt = receipt_of(*stages)
    together = [codec.codec_id for codec in stages]

    refusal(bank, stages[0], receipt)
    for codec in stages:
        bank.add(codec, receipt, together=together)

    assert bank.qualification(together) == Qualification(True, receipt.digest())
    assert not bank.qualification(together[:1]).is_qualified
    assert not bank.qualification(together[::-1]).is_qualified
    refusal(bank, stages[0])


def test_a_lossy_stage_beside_a_lossless_one_is_lossy(stages: list[KvtcCodec]) -> None:
    """The receipt must be of exactly that pair."""
    raw = RawCodec(stages[1].stage, GEOMETRY.of_stage(stages[1].stage), "float32")
    pair = [stages[0].codec_id, raw.codec_id]
    bank = CodecBank("a")
    bank.add(raw, together=pair)
    bank.add(stages[0], allow_unqualified=True, together=pair)

    assert not bank.qualification(pair).is_qualified
    bank.add(stages[0], receipt_of(stages[0], raw), together=pair)
    assert bank.qualification(pair).is_qualified


def test_a_codec_must_be_among_those_it_is_used_with(stages: list[KvtcCodec]) -> None:
    """Else another's receipt would let it in."""
    with pytest.raises(ValueError, match="not among"):
        CodecBank("a").add(stages[0], receipt_of(stages[1]), together=[stages[1].codec_id])


def test_the_qualification_of_what_is_not_here_is_unknown() -> None:
    """Rather than granted."""
    with pytest.raises(UnknownCodecError):
        CodecBank("a").qualification([CodecId(b"x" * 16)])


def test_of_several_offers_one_refusal_stops_no_other(codec: KvtcCodec) -> None:
    """A worker serves what it can, and reports the rest."""
    bank = CodecBank("a")
    offers = [
        CodecOffer(
            codec=offered, together=(offered.codec_id,), receipt=None, allow_unqualified=False
        )
        for offered in (codec, RAW)
    ]

    refusals = bank.take(offers)

    assert [error.codec for error in refusals] == [codec.codec_id.hex()]
    assert bank.loaded() == (RAW.codec_id,)


@pytest.mark.parametrize("is_allowed", [True, False])
def test_an_offer_carries_all_that_speaks_for_a_codec(
    stages: list[KvtcCodec], is_allowed: bool
) -> None:
    """Its receipt, its company and the permission reach the bank."""
    bank = CodecBank("a")
    together = tuple(codec.codec_id for codec in stages)
    receipt = None if is_allowed else receipt_of(*stages)

    refusals = bank.take(
        CodecOffer(codec=codec, together=together, receipt=receipt, allow_unqualified=is_allowed)
        for codec in stages
    )

    assert refusals == []
    assert bank.qualification(together).is_qualified is not is_allowed
