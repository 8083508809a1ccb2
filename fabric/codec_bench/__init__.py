"""Measure the codecs of a model: rate against quality, speed, and memory, in one run.

`fabric.codec_bench.measure` runs the arms on natural text, `fabric.codec_bench.curve` reads
their ratios at equal quality, `fabric.codec_bench.speed` races them against prefilling, and
`fabric.codec_bench.run` does all of it for ``kvfabric bench codec``.
"""

from __future__ import annotations
