"""The comparison arms that need no calibration, in the order of tables."""

from __future__ import annotations

from functools import partial

from codec.comparators.ans import RansCoder
from codec.comparators.arm import Arm, ArrayCoder, CodedArm
from codec.comparators.casts import Fp8Coder, RawArm
from codec.comparators.kivi import PerChannelCoder, PerTokenCoder
from codec.comparators.lossless import BytesCoder
from codec.comparators.turboquant import RotationCoder
from codec.entropy.deflate import DeflateCoder
from codec.entropy.zstd import ZstdCoder

ZSTD_LEVEL = 3
"""The library's own default."""


def arms() -> dict[str, Arm]:
    """Every arm without parameters by its name, always in this order.

    Making them needs no optional package; using one may.
    """
    zstd = partial(ZstdCoder, level=ZSTD_LEVEL)
    made: list[Arm] = [RawArm()]
    lossless: list[tuple[str, ArrayCoder]] = [
        ("zstd", BytesCoder(zstd)),
        ("zstd-planes", BytesCoder(zstd, has_planes=True)),
        ("deflate", BytesCoder(DeflateCoder)),
        ("deflate-planes", BytesCoder(DeflateCoder, has_planes=True)),
        ("ans-planes", RansCoder()),
    ]
    made += [CodedArm(name, coder, coder) for name, coder in lossless]
    for name, fp8 in (("fp8", Fp8Coder()), ("fp8-scaled", Fp8Coder(is_scaled=True))):
        made.append(CodedArm(name, fp8, fp8))
    made += [
        CodedArm(f"kivi-int{bits}", PerChannelCoder(bits), PerTokenCoder(bits))
        for bits in (8, 4, 2)
    ]
    made += [
        CodedArm(f"turboquant-{bits}b", RotationCoder(bits), RotationCoder(bits))
        for bits in (4, 3, 2)
    ]
    return {arm.name: arm for arm in made}
