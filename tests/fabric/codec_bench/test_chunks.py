"""A prefix of real text and its chunks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from codec.blob import read_blob
from codec.errors import ConfigError
from fabric.codec_bench.chunks import decode_chunks, encode_chunks, longest_prefix, prefix
from fabric.engines.loading import LoadedModel
from fabric.evaluate.sets import packaged_text
from tests.fabric.codec_bench.small import Made, entropy_codec

#: A tiny model has too few rows for its drift to be steady.
pytestmark = pytest.mark.filterwarnings("ignore::codec.drift.DriftWarning")


def test_a_prefix_is_the_natural_texts_one_after_the_other(made: Made) -> None:
    """And again where they end; the tiny tokenizer has a token per character."""
    prose, law = packaged_text("prose.txt"), packaged_text("constitution.txt")
    num_all = sum(
        len(packaged_text(name))
        for name in ("prose.txt", "constitution.txt", "gpl-3.txt", "statistics.txt")
    )

    found = prefix(made.loaded, num_all + 5)

    assert len(found) == num_all + 5
    assert made.loaded.tokenizer.decode(found[:20]) == prose[:20]
    assert made.loaded.tokenizer.decode(found[len(prose) :][:20]) == law[:20]
    assert found[num_all:] == found[:5]
    assert prefix(made.loaded, 7) == found[:7]


@pytest.mark.parametrize(
    ("limit", "wanted", "found"), [(None, 4096, 4096), (4096, 4096, 4096), (1000, 4096, 768)]
)
def test_a_model_that_takes_less_is_given_whole_chunks(
    limit: int | None, wanted: int, found: int
) -> None:
    """As many as fit."""
    model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=limit))
    loaded = LoadedModel(model, None, "some", "weights")

    assert longest_prefix(loaded, wanted, 256) == found


def test_a_model_that_takes_no_chunk_is_refused() -> None:
    """Before anything is run."""
    model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=255))

    with pytest.raises(ConfigError, match="the model takes 255 tokens"):
        longest_prefix(LoadedModel(model, None, "some", "weights"), 4096, 256)


def test_chunks_cover_the_prefix_in_order(made: Made) -> None:
    """The last may be shorter; what comes back is near what went in, chunk by chunk."""
    codec = entropy_codec(made.codecs)
    tokens = prefix(made.loaded, 70)
    cache, _ = made.engine.prefill(tokens)
    rows = made.engine.capture(cache, 0, 70)

    blobs = encode_chunks(made.engine, codec, rows, 32)
    found = decode_chunks(codec, blobs)

    headers = [read_blob(blob).header for blob in blobs]
    assert [(one.start_position, one.num_tokens) for one in headers] == [(0, 32), (32, 32), (64, 6)]
    assert len({one.component.chunk_key for one in headers}) == 3
    for kind in (0, 1):
        restored = torch.cat([part[kind] for part in found])
        error = (restored - rows[kind]).square().mean() / rows[kind].var()
        assert restored.shape == rows[kind].shape
        assert error < 0.2
