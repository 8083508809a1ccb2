"""Chunks to blobs and back through a worker: exact, in their places, and only what was asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from actors.arena.arena import Arena
from actors.arena.driver_host import HostVmmDriver
from actors.codecs import CodecBank
from actors.coding import Prefix, assemble, store_chunks, time_decoding
from actors.worker import Worker
from codec.blob import pack_blob, read_blob
from codec.errors import (
    ArenaFullError,
    CorruptBlobError,
    IdentityMismatchError,
    UnknownCodecError,
    UnknownComponentError,
)
from codec.identity import CodecId, ComponentKey, Digest
from codec.kvtc import KvtcCodec
from codec.raw import RawCodec
from codec.timing import StepTimes
from policies.residency.keys import chunk_keys
from tests.codec.synthetic import GEOMETRY, NAMESPACE, cache, calibrated

CHUNK = 8
MIB = 1 << 20


def a_prefix(num_tokens: int = 40, *, dtype: str = "float32", salt: bytes = NAMESPACE) -> Prefix:
    """The whole chunks of a prompt of made-up tokens."""
    tokens = tuple(range(100, 100 + num_tokens))
    keys = chunk_keys(Digest(salt), tokens, tokens_per_chunk=CHUNK)
    return Prefix(
        namespace=Digest(salt),
        keys=tuple(keys),
        tokens=tokens,
        tokens_per_chunk=CHUNK,
        dtype=dtype,
        geometry=GEOMETRY,
    )


def raw_stages(num_stages: int, dtype: str = "float32") -> list[RawCodec]:
    """A raw codec per pipeline stage."""
    return [
        RawCodec(stage, GEOMETRY.of_stage(stage), dtype)
        for stage in GEOMETRY.split_layers(num_stages)
    ]


@pytest.fixture
def worker() -> Iterator[Worker]:
    """A worker with 8 MiB, whose invariants are checked after the test."""
    arena = Arena(HostVmmDriver(8 * MIB), capacity_bytes=8 * MIB, extent_bytes=2 * MIB)
    worker = Worker(node="a", incarnation=7, arena=arena)
    yield worker
    worker.check()
    arena.close()


def banked(*codecs: RawCodec | KvtcCodec) -> tuple[CodecBank, tuple[CodecId, ...]]:
    """A bank with these codecs, and their identities."""
    bank = CodecBank("a")
    return bank, tuple(bank.add(codec, allow_unqualified=True) for codec in codecs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("boundary", [1, 7, 8, 9, 40])
def test_any_prefix_comes_back_bit_for_bit(
    worker: Worker, dtype: str, num_stages: int, boundary: int
) -> None:
    """Through stages of their own, cut within a chunk or at its edge."""
    bank, codecs = banked(*raw_stages(num_stages, dtype))
    keys, values = cache(40, seed=1, dtype=dtype)
    prefix = a_prefix(dtype=dtype)
    store_chunks(worker, bank, prefix, keys_TLHD=keys, values_TLHD=values, codecs=codecs)

    again = assemble(
        worker, bank, prefix, codecs=codecs, boundary_tokens=boundary, steps=StepTimes()
    )

    assert torch.equal(again[0], keys[:boundary])
    assert torch.equal(again[1], values[:boundary])


def test_the_transform_codec_comes_back_close_with_its_steps(worker: Worker) -> None:
    """Sinks of the first chunk exactly; later chunks are rotated to where they were."""
    bank, codecs = banked(KvtcCodec(calibrated()))
    keys, values = cache(40, seed=1)
    prefix = a_prefix()
    placements = store_chunks(
        worker, bank, prefix, keys_TLHD=keys, values_TLHD=values, codecs=codecs
    )
    steps = StepTimes()

    again, _ = assemble(worker, bank, prefix, codecs=codecs, boundary_tokens=33, steps=steps)

    assert torch.equal(again[:4], keys[:4])
    assert (again - keys[:33]).square().mean() < 0.01 * keys.var()
    assert set(steps.seconds) == {"verify", "entropy", "dequantize", "project", "rope"}
    assert [p.decoded_bytes for p in placements] == [GEOMETRY.raw_bytes_per_token * CHUNK] * 5


def test_storing_from_a_later_chunk_continues_a_prefix(worker: Worker) -> None:
    """A longer prompt adds its new chunks; those before keep their bytes."""
    bank, codecs = banked(*raw_stages(1))
    keys, values = cache(40, seed=1)
    prefix = a_prefix()
    store_chunks(
        worker,
        bank,
        dataclasses.replace(prefix, keys=prefix.keys[:2]),
        keys_TLHD=keys[:16],
        values_TLHD=values[:16],
        codecs=codecs,
    )

    added = store_chunks(
        worker,
        bank,
        prefix,
        keys_TLHD=keys[16:],
        values_TLHD=values[16:],
        codecs=codecs,
        first_chunk=2,
    )
    again, _ = assemble(worker, bank, prefix, codecs=codecs, boundary_tokens=40, steps=StepTimes())

    assert len(added) == 3
    assert worker.stat().replaced == 0
    assert torch.equal(again, keys)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"namespace": b"m" * 16}, "namespace"),
        ({"start_position": 64}, "start_position"),
        ({"first_token": 1}, "first_token"),
        ({"last_token": 1}, "last_token"),
        ({"num_tokens": 7}, "num_tokens"),
    ],
)
def test_a_blob_of_something_else_is_refused_and_quarantined(
    worker: Worker, change: dict[str, object], field: str
) -> None:
    """Another model's bytes, or those of tokens whose digest collides, are a miss."""
    bank, codecs = banked(*raw_stages(1))
    keys, values = cache(40, seed=1)
    prefix = a_prefix()
    store_chunks(worker, bank, prefix, keys_TLHD=keys, values_TLHD=values, codecs=codecs)
    with worker.get(ComponentKey(prefix.keys[1], GEOMETRY.whole), codecs[0]) as pin:
        blob = read_blob(pin.view)
        forged = pack_blob(
            dataclasses.replace(blob.header, **change),  # type: ignore[arg-type]
            list(blob.sections.values()),
        )
        del blob
    worker.put(forged)

    with pytest.raises(IdentityMismatchError, match=field.replace("_", ".")):
        assemble(worker, bank, prefix, codecs=codecs, boundary_tokens=20, steps=StepTimes())

    assert worker.stat().quarantined == 1
    with pytest.raises(UnknownComponentError):
        assemble(worker, bank, prefix, codecs=codecs, boundary_tokens=20, steps=StepTimes())


def test_bytes_that_changed_at_rest_are_refused_and_quarantined(worker: Worker) -> None:
    """A bit flips after it was stored; the good chunk before it is untouched."""
    bank, codecs = banked(KvtcCodec(calibrated()))
    keys, values = cache(40, seed=1)
    prefix = a_prefix()
    store_chunks(worker, bank, prefix, keys_TLHD=keys, values_TLHD=values, codecs=codecs)
    worker.damage(ComponentKey(prefix.keys[1], GEOMETRY.whole), codecs[0])

    with pytest.raises(CorruptBlobError):
        assemble(worker, bank, prefix, codecs=codecs, boundary_tokens=20, steps=StepTimes())

    assert worker.stat().quarantined == 1
    assemble(worker, bank, prefix, codecs=codecs, boundary_tokens=8, steps=StepTimes())


def test_a_missing_chunk_is_an_unknown_component(worker: Worker) -> None:
    """Evicted since the plan was made."""
    bank, codecs = banked(*raw_stages(1))
    keys, values = cache(40, seed=1)
    prefix = a_prefix()
    store_chunks(worker, bank, prefix, keys_TLHD=keys, values_TLHD=values, codecs=codecs)
    worker.evict(ComponentKey(prefix.keys[3], GEOMETRY.whole), codecs[0])

    with pytest.raises(UnknownComponentError):
        assemble(worker, bank, prefix, codecs=codecs, boundary_tokens=40, steps=StepTimes())


def test_an_unknown_codec_stores_nothing(worker: Worker) -> None:
    """Also where another codec of the call is known."""
    bank, (known,) = banked(*raw_stages(1))
    keys, values = cache(40, seed=1)

    with pytest.raises(UnknownCodecError):
        store_chunks(
            worker,
            bank,
            a_prefix(),
            keys_TLHD=keys,
            values_TLHD=values,
            codecs=(known, CodecId(b"x" * 16)),
        )

    assert worker.stat().num_components == 0


def test_a_full_arena_keeps_the_shorter_prefix() -> None:
    """What fitted is a correct prefix, and can be restored."""
    arena = Arena(HostVmmDriver(2 * MIB), capacity_bytes=2 * MIB, extent_bytes=2 * MIB)
    worker = Worker(node="a", incarnation=7, arena=arena)
    filler = worker.reserve_incoming(2 * MIB - 40_000)
    bank, codecs = banked(*raw_stages(1))
    keys, values = cache(40 * 8, seed=1)
    prefix = a_prefix(40 * 8)

    with pytest.raises(ArenaFullError):
        store_chunks(worker, bank, prefix, keys_TLHD=keys, values_TLHD=values, codecs=codecs)

    held = worker.stat().num_components
    assert 0 < held < 40
    again, _ = assemble(
        worker, bank, prefix, codecs=codecs, boundary_tokens=held * CHUNK, steps=StepTimes()
    )
    assert torch.equal(again, keys[: held * CHUNK])
    filler.abort()
    worker.check()
    arena.close()


@pytest.mark.parametrize("boundary", [0, -1, 41])
def test_a_boundary_outside_the_prefix_is_refused(worker: Worker, boundary: int) -> None:
    """A caller's mistake, before anything is read."""
    bank, codecs = banked(*raw_stages(1))

    with pytest.raises(ValueError, match="boundary_tokens"):
        assemble(
            worker, bank, a_prefix(), codecs=codecs, boundary_tokens=boundary, steps=StepTimes()
        )


def test_stages_must_hold_every_layer_once(worker: Worker) -> None:
    """Half a cache, or one half twice, would leave memory as it was."""
    bank, (first, second) = banked(*raw_stages(2))

    for codecs in ((first,), (first, first), (first, second, second)):
        with pytest.raises(ValueError, match="exactly once"):
            assemble(worker, bank, a_prefix(), codecs=codecs, boundary_tokens=8, steps=StepTimes())


def test_a_prefix_needs_the_tokens_of_its_chunks() -> None:
    """And a dtype that blobs know."""
    prefix = a_prefix()

    with pytest.raises(ValueError, match="tokens for each of 5 chunks"):
        dataclasses.replace(prefix, tokens=prefix.tokens[:39])
    with pytest.raises(ValueError, match="dtype must be one of"):
        dataclasses.replace(prefix, dtype="int8")


@pytest.mark.parametrize("codec", [KvtcCodec(calibrated()), *raw_stages(1)], ids=["kvtc", "raw"])
def test_a_codec_is_timed_on_an_example(codec: KvtcCodec | RawCodec) -> None:
    """Steps, sizes and seconds, as the latency model takes them."""
    times = time_decoding(codec, dtype="float32", num_tokens=16)

    by_step = {step: (size, seconds) for step, size, seconds in times}
    assert all(seconds > 0 for _, seconds in by_step.values())
    if codec.name == "kvtc":
        assert by_step["project"][0] == 16 * GEOMETRY.raw_bytes_per_token
        assert by_step["verify"][0] < by_step["project"][0]
    else:
        assert list(by_step) == ["verify"]


def test_a_token_is_coded_once(worker: Worker) -> None:
    """Pitfall 5: a cache that came out of a lossy codec does not go in again on top of itself."""
    bank, codecs = banked(KvtcCodec(calibrated()))
    keys, values = cache(40, seed=1)
    prefix = a_prefix()
    short = dataclasses.replace(prefix, keys=prefix.keys[:3])
    first = store_chunks(
        worker, bank, short, keys_TLHD=keys[:24], values_TLHD=values[:24], codecs=codecs
    )
    with worker.get(first[1].component, codecs[0]) as pin:
        before = bytes(pin.view)
    lossy, _ = assemble(worker, bank, short, codecs=codecs, boundary_tokens=24, steps=StepTimes())

    again = store_chunks(
        worker,
        bank,
        prefix,
        keys_TLHD=torch.cat([lossy, keys[24:]]),
        values_TLHD=values,
        codecs=codecs,
    )

    assert again[:3] == first
    assert (worker.stat().puts, worker.stat().replaced) == (5, 0)
    with worker.get(first[1].component, codecs[0]) as pin:
        assert bytes(pin.view) == before


@pytest.mark.parametrize("wrong", ["nan", "inf", "layers", "tokens", "dtype"])
def test_a_cache_that_is_not_the_prefixs_stores_nothing(worker: Worker, wrong: str) -> None:
    """Whatever the codec, and also where only a later chunk is wrong."""
    bank, codecs = banked(*raw_stages(1))
    keys, values = cache(40, seed=1)
    if wrong in ("nan", "inf"):
        keys[39, 2, 1, 3] = float(wrong)
    elif wrong == "layers":
        keys = torch.cat([keys, keys], dim=1)
    elif wrong == "tokens":
        keys = keys[:39]
    else:
        keys = keys.half()

    with pytest.raises(ValueError, match="keys must be"):
        store_chunks(worker, bank, a_prefix(), keys_TLHD=keys, values_TLHD=values, codecs=codecs)

    assert worker.stat().num_components == 0
