"""Race encoding and decoding of a real prefix against prefilling it.

In one process, with one number of threads: a turn prefills, then encodes and decodes with
each codec, so that whatever else the machine is doing falls on all of them.  A speed-up is
the median of the turns' own ratios.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from codec.entropy_codec import EntropyCodec
from codec.errors import ConfigError
from codec.timing import StepTimes
from fabric.calibrate import Progress
from fabric.codec_bench.chunks import (
    Rows,
    decode_chunks,
    encode_chunks,
    longest_prefix,
    prefix,
)
from fabric.codec_bench.floors import (
    Coded,
    MachineRates,
    StepWork,
    coded_in,
    decode_work,
    encode_work,
    measure_rates,
)
from fabric.codec_bench.memory import peak_bytes
from fabric.engines.loading import LoadedModel
from fabric.engines.protocol import Engine
from fabric.evaluate.arms import TOKENS_PER_CHUNK

_WARM_UP_CHUNKS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedConfig:
    """How the race is run."""

    prefix_tokens: int = 4096
    num_turns: int = 3
    num_threads: int = 1
    """Of torch, for the race alone."""

    tokens_per_chunk: int = TOKENS_PER_CHUNK

    def __post_init__(self) -> None:
        for name in ("num_turns", "num_threads", "tokens_per_chunk"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.prefix_tokens < self.tokens_per_chunk:
            raise ConfigError(
                f"prefix_tokens must be a chunk of {self.tokens_per_chunk} or more, "
                f"got {self.prefix_tokens}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One step of all chunks."""

    seconds: float
    """Median over the turns."""

    floor_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """One codec against prefilling."""

    name: str
    prefill_s: float
    encode_s: float
    decode_s: float
    """Medians over the turns; so are the speed-ups, of each turn's own ratio."""

    encode_speedup: float
    decode_speedup: float
    coded: Coded
    encode_steps: Mapping[str, StepTime]
    decode_steps: Mapping[str, StepTime]
    raw_bytes: int
    """Of the prefix's keys and values, in the engine's data type."""

    encode_peak_over_raw: float | None
    """Memory at the peak, over `raw_bytes`: coding chunk after chunk, blobs kept."""

    decode_peak_over_raw: float | None
    """The same, all restored chunks kept."""

    encode_chunk_peak_over_raw: float | None
    """Of a single chunk, over the chunk's own bytes."""

    decode_chunk_peak_over_raw: float | None


@dataclass(slots=True)
class _Turns:
    """Seconds of one codec, turn by turn."""

    prefill_s: list[float] = field(default_factory=list)
    encode_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)
    encode_steps: list[StepTimes] = field(default_factory=list)
    decode_steps: list[StepTimes] = field(default_factory=list)


def race(
    engine: Engine[Any],
    loaded: LoadedModel,
    codecs: Mapping[str, EntropyCodec],
    config: SpeedConfig,
    on_progress: Progress = lambda _what, _fraction: None,
) -> tuple[MachineRates, list[Race]]:
    """Race codecs of the whole model against prefilling, all with the same threads.

    Parameters
    ----------
    codecs
        By the names of their results.
    """
    wanted = longest_prefix(loaded, config.prefix_tokens, config.tokens_per_chunk)
    tokens = prefix(loaded, wanted)
    with _threads(config.num_threads):
        rates = measure_rates()
        rows = _warm_up(engine, tokens, codecs, config)
        turns = {name: _Turns() for name in codecs}
        blobs: dict[str, list[bytes]] = {}
        for number in range(config.num_turns):
            rows, prefill_s = _prefilled(engine, tokens)
            for place, (name, codec) in enumerate(codecs.items()):
                blobs[name] = _take_turn(engine, codec, rows, config, turns[name])
                turns[name].prefill_s.append(prefill_s)
                done = number + (place + 1) / len(codecs)
                on_progress("race", done / config.num_turns)
        results = [
            _result(
                name,
                codec,
                turns[name],
                coded=coded_in(codec, blobs[name]),
                rates=rates,
            )
            | _peaks(engine, codec, rows, blobs[name], config)
            for name, codec in codecs.items()
        ]
    return rates, [Race(**result) for result in results]


def _prefilled(engine: Engine[Any], tokens: Sequence[int]) -> tuple[Rows, float]:
    start = time.perf_counter()
    cache, _ = engine.prefill(tokens)
    seconds = time.perf_counter() - start
    return engine.capture(cache, 0, len(tokens)), seconds


def _warm_up(
    engine: Engine[Any],
    tokens: Sequence[int],
    codecs: Mapping[str, EntropyCodec],
    config: SpeedConfig,
) -> Rows:
    """Have everything compiled and every library set up before the first turn."""
    few = tokens[: _WARM_UP_CHUNKS * config.tokens_per_chunk]
    rows, _ = _prefilled(engine, few)
    for codec in codecs.values():
        decode_chunks(codec, encode_chunks(engine, codec, rows, config.tokens_per_chunk))
    return rows


def _take_turn(
    engine: Engine[Any], codec: EntropyCodec, rows: Rows, config: SpeedConfig, turns: _Turns
) -> list[bytes]:
    for steps in (turns.encode_steps, turns.decode_steps):
        steps.append(StepTimes())
    start = time.perf_counter()
    blobs = encode_chunks(engine, codec, rows, config.tokens_per_chunk, turns.encode_steps[-1])
    encoded = time.perf_counter()
    decode_chunks(codec, blobs, turns.decode_steps[-1])
    turns.decode_s.append(time.perf_counter() - encoded)
    turns.encode_s.append(encoded - start)
    return blobs


def _result(
    name: str,
    codec: EntropyCodec,
    turns: _Turns,
    *,
    coded: Coded,
    rates: MachineRates,
) -> dict[str, Any]:
    return {
        "name": name,
        "prefill_s": statistics.median(turns.prefill_s),
        "encode_s": statistics.median(turns.encode_s),
        "decode_s": statistics.median(turns.decode_s),
        "encode_speedup": _median_ratio(turns.prefill_s, turns.encode_s),
        "decode_speedup": _median_ratio(turns.prefill_s, turns.decode_s),
        "coded": coded,
        "encode_steps": _steps(turns.encode_steps, encode_work(codec, coded), rates),
        "decode_steps": _steps(turns.decode_steps, decode_work(codec, coded), rates),
    }


def _median_ratio(over_s: Sequence[float], under_s: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(over_s, under_s, strict=True))


def _steps(
    turns: Sequence[StepTimes], work: Mapping[str, StepWork], rates: MachineRates
) -> dict[str, StepTime]:
    """Every step that the codec named, in its order; one without a floor has 0."""
    return {
        name: StepTime(
            seconds=statistics.median(turn.seconds.get(name, 0.0) for turn in turns),
            floor_s=work.get(name, StepWork()).floor_s(rates),
        )
        for name in turns[-1].seconds
    }


def _peaks(
    engine: Engine[Any],
    codec: EntropyCodec,
    rows: Rows,
    blobs: Sequence[bytes],
    config: SpeedConfig,
) -> dict[str, Any]:
    size = config.tokens_per_chunk
    chunk = (rows[0][:size].clone(), rows[1][:size].clone())
    raw_bytes, chunk_bytes = _nbytes(rows), _nbytes(chunk)
    return {
        "raw_bytes": raw_bytes,
        "encode_peak_over_raw": _over(
            peak_bytes(lambda: encode_chunks(engine, codec, rows, size)), raw_bytes
        ),
        "decode_peak_over_raw": _over(peak_bytes(lambda: decode_chunks(codec, blobs)), raw_bytes),
        "encode_chunk_peak_over_raw": _over(
            peak_bytes(lambda: encode_chunks(engine, codec, chunk, size)), chunk_bytes
        ),
        "decode_chunk_peak_over_raw": _over(
            peak_bytes(lambda: decode_chunks(codec, blobs[:1])), chunk_bytes
        ),
    }


def _over(num_bytes: int | None, raw_bytes: int) -> float | None:
    return None if num_bytes is None else num_bytes / raw_bytes


def _nbytes(rows: Rows) -> int:
    return sum(array.numel() * array.element_size() for array in rows)


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    """Torch's threads, and afterwards as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
