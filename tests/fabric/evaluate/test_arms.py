"""Arms: what goes in comes back in its place, and every byte is counted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from codec.blob import read_header
from codec.comparators.arm import Restored
from codec.geometry import Stage
from codec.raw import RawCodec
from fabric.engines.transformers import TransformersEngine
from fabric.evaluate.arms import CodecArm, ComparatorArm, FullPrecision
from tests.fabric.engines.tiny import some_tokens, tiny_engine

NUM_ROWS = 22
START = 4


class RecordingCodec(RawCodec):
    """Keeps the blobs it made."""

    def __init__(self, stage: Stage, engine: TransformersEngine) -> None:
        """A raw codec of one stage of the engine's model."""
        namespace = engine.namespace()
        super().__init__(
            stage,
            engine.geometry.of_stage(stage),
            namespace.dtype,
            namespace=namespace.digest(),
        )
        self.blobs: list[bytes] = []

    def encode(self, *args: Tensor, **options: object) -> bytes:
        """See the parent."""
        self.blobs.append(super().encode(*args, **options))
        return self.blobs[-1]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest) -> TransformersEngine:
    """A tiny model that computes in either type."""
    return tiny_engine("llama", getattr(torch, request.param))


@pytest.fixture
def rows(engine: TransformersEngine) -> tuple[Tensor, Tensor]:
    """Captured rows from the start position on."""
    cache, _ = engine.prefill(some_tokens(START + NUM_ROWS))
    return engine.capture(cache, START, START + NUM_ROWS)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_codecs_give_every_row_back_in_its_place(
    engine: TransformersEngine, rows: tuple[Tensor, Tensor], num_stages: int
) -> None:
    """Chunk by chunk and stage by stage; what is counted is what they wrote."""
    stages = engine.geometry.split_layers(num_stages)
    codecs = [RecordingCodec(stage, engine) for stage in stages]
    arm = CodecArm("raw", codecs, engine, target=3.0, tokens_per_chunk=8)

    keys, values, stored_bytes = arm.code(*rows, START)

    assert torch.equal(keys, rows[0])
    assert torch.equal(values, rows[1])
    assert stored_bytes == sum(len(blob) for codec in codecs for blob in codec.blobs)
    for codec in codecs:
        headers = [read_header(blob) for blob in codec.blobs]
        assert [(h.start_position, h.num_tokens) for h in headers] == [(4, 8), (12, 8), (20, 6)]
    assert (arm.name, arm.target, arm.codecs) == ("raw", 3.0, tuple(codecs))


@pytest.mark.parametrize(
    "stages",
    [[], [Stage(0, 2, 0, 2)], [Stage(2, 4, 0, 2), Stage(0, 2, 0, 2)], [Stage(0, 4, 0, 2)] * 2],
)
def test_codecs_that_do_not_tile_the_model_are_refused(
    engine: TransformersEngine, stages: list[Stage]
) -> None:
    """None, half of it, the wrong order, all of it twice."""
    with pytest.raises(ValueError, match="stages"):
        CodecArm("raw", [RecordingCodec(stage, engine) for stage in stages], engine)


def test_full_precision_counts_16_bits(
    engine: TransformersEngine, rows: tuple[Tensor, Tensor]
) -> None:
    """Whatever the engine computes in."""
    keys, values, stored_bytes = FullPrecision(engine.geometry).code(*rows, START)

    assert torch.equal(keys, rows[0])
    assert torch.equal(values, rows[1])
    assert stored_bytes == 2 * (keys.numel() + values.numel())


class HalvingComparator:
    """Gives back half of what it got."""

    name = "halving"

    def restore(self, keys_TLHD: Tensor, values_TLHD: Tensor) -> Restored:
        """See `codec.comparators.arm.Arm.restore`."""
        return Restored(
            keys_TLHD=keys_TLHD.float() / 2, values_TLHD=values_TLHD.float() / 4, stored_bytes=17
        )


def test_a_comparator_gives_back_the_engines_type(
    engine: TransformersEngine, rows: tuple[Tensor, Tensor]
) -> None:
    """Under its own name, with the bytes it says."""
    arm = ComparatorArm(HalvingComparator())

    keys, values, stored_bytes = arm.code(*rows, START)

    assert (arm.name, arm.target, stored_bytes) == ("halving", None, 17)
    assert torch.equal(keys, rows[0] / 2)
    assert torch.equal(values, rows[1] / 4)
    assert keys.dtype == values.dtype == rows[0].dtype
