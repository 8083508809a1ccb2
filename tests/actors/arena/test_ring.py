"""Rings: what they cost for known widths, and windows against concatenation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.arena.driver_host import HostVmmDriver
from actors.arena.extents import ExtentPool
from actors.arena.ring import (
    MirrorRing,
    RingLayout,
    RingNeed,
    choose_ring_layout,
    ring_candidates,
    ring_rows,
)
from actors.arena.syscalls import PAGE_BYTES
from actors.arena.views import keys_values
from policies.retention.program import KvShape
from tests.suites.quiet import QUIET

CUDA_EXTENT = 2 << 20
KIB = 1024


def need_of(width_bytes: int, num_layers: int = 1) -> RingNeed:
    """A window of 1024 tokens, as pages of 16; its compiled period is 65."""
    return RingNeed(
        page_tokens=16,
        cells=65,
        num_layers=num_layers,
        width_bytes=width_bytes,
        window_tokens=1024,
    )


@pytest.mark.parametrize(
    ("row_bytes", "rows"),
    [(4 * KIB, 1536), (2 * KIB, 2048), (KIB, 2048), (512, 4096), (1152, 16384), (18 * KIB, 2048)],
)
def test_rows_of_known_widths(row_bytes: int, rows: int) -> None:
    """On a device with granules of 2 MiB, for a window of 1024 and pages of 16."""
    least = need_of(row_bytes).least_tokens
    assert least == 1040
    found = ring_rows(
        least_tokens=least, page_tokens=16, row_bytes=row_bytes, extent_bytes=CUDA_EXTENT
    )
    assert found == rows


@pytest.mark.parametrize(
    ("width_bytes", "rows", "row_bytes", "over"),
    [
        (4 * KIB, 1536, 4 * KIB, 1.5),
        (2 * KIB, 2048, 2 * KIB, 2.0),
        (KIB, 2048, KIB, 2.0),
        (512, 4096, 512, 4.0),
        (1152, 2048, 2 * KIB, 2 * 2048 / 1152),
    ],
)
def test_one_layer_of_known_widths(
    width_bytes: int, rows: int, row_bytes: int, over: float
) -> None:
    """An odd width is padded, which takes 4 MiB rather than 18; the others are not."""
    found = choose_ring_layout(need_of(width_bytes), extent_bytes=CUDA_EXTENT)

    assert (found.rows, found.row_bytes, found.num_planes) == (rows, row_bytes, 1)
    assert found.pad_bytes == row_bytes - width_bytes
    assert found.over_allocation == pytest.approx(over)


def test_unpadded_odd_rows_cost_sixteen_times_the_window() -> None:
    """Which is why padding is a candidate."""
    plain, padded = ring_candidates(need_of(1152), extent_bytes=CUDA_EXTENT)

    assert (plain.rows, plain.pad_bytes, plain.over_allocation) == (16384, 0, 16.0)
    assert (padded.row_bytes, padded.ring_bytes) == (2048, 4 << 20)


def test_layers_share_a_row_only_where_that_takes_less() -> None:
    """Twelve layers of 2 KiB rows and a window of 128: 8 times its bytes, or 2 packed."""
    small = replace(need_of(2 * KIB, num_layers=12), window_tokens=128, cells=9)
    apart = choose_ring_layout(small, extent_bytes=CUDA_EXTENT, max_layers_per_row=1)
    packed = choose_ring_layout(small, extent_bytes=CUDA_EXTENT)
    assert (apart.rows, apart.over_allocation) == (1024, 8.0)
    assert (packed.rows, packed.over_allocation) == (256, 2.0)
    assert packed.layers_per_row == 4  # twelve in one row take as much


def test_among_equals_the_fewest_layers_share_a_row() -> None:
    """Three layers apart take as much as three in one row, and kernels prefer them apart."""
    need = need_of(4 * KIB, num_layers=3)
    sizes = {it.layers_per_row: it.ring_bytes for it in ring_candidates(need, extent_bytes=1 << 21)}
    assert sizes[1] == sizes[3]

    assert choose_ring_layout(need, extent_bytes=CUDA_EXTENT).layers_per_row == 1


def test_the_last_plane_may_have_fewer_layers() -> None:
    """Five layers, two in a row, make three planes."""
    need = need_of(KIB, num_layers=5)
    found = next(
        it for it in ring_candidates(need, extent_bytes=CUDA_EXTENT) if it.layers_per_row == 2
    )

    assert found.num_planes == 3
    assert [found.locate(index) for index in (0, 1, 4)] == [(0, 0), (0, KIB), (2, 0)]
    assert found.ring_bytes == 3 * found.plane_extents * CUDA_EXTENT


NEEDS = st.builds(
    RingNeed,
    page_tokens=st.integers(1, 20),
    cells=st.integers(1, 40),
    num_layers=st.integers(1, 6),
    width_bytes=st.integers(1, 400).map(lambda n: 4 * n),
    window_tokens=st.none() | st.integers(1, 300),
    step_tokens=st.integers(1, 50),
    late_pages=st.integers(0, 3),
)


@QUIET
@given(NEEDS)
def test_every_candidate_fits_and_the_choice_is_the_least(need: RingNeed) -> None:
    """Whole pages, whole extents, at least the compiled period and what one step reads."""
    found = list(ring_candidates(need, extent_bytes=PAGE_BYTES))
    for layout in found:
        assert layout.rows % need.page_tokens == 0
        assert layout.plane_bytes % PAGE_BYTES == 0
        assert layout.cells >= need.cells + need.late_pages
        if need.window_tokens is not None:
            seen = need.window_tokens + need.step_tokens - 1
            assert layout.rows >= seen + need.page_tokens
        assert layout.row_bytes == layout.layers_per_row * need.width_bytes + layout.pad_bytes
        assert layout.over_allocation >= 1
        smaller = layout.rows - need.page_tokens
        assert smaller < need.least_tokens or (smaller * layout.row_bytes) % PAGE_BYTES
    chosen = choose_ring_layout(need, extent_bytes=PAGE_BYTES)
    assert chosen.ring_bytes == min(layout.ring_bytes for layout in found)
    ties = [it for it in found if it.ring_bytes == chosen.ring_bytes]
    assert chosen.layers_per_row == min(it.layers_per_row for it in ties)


@pytest.mark.parametrize("name", ["page_tokens", "cells", "width_bytes", "step_tokens"])
def test_needs_are_positive(name: str) -> None:
    """Nothing is no need."""
    with pytest.raises(ValueError, match=name):
        replace(need_of(KIB), **{name: 0})
    with pytest.raises(ValueError, match="late_pages"):
        replace(need_of(KIB), late_pages=-1)


@contextmanager
def double_mapped(layout: RingLayout) -> Iterator[torch.Tensor]:
    """Rows of bytes of one plane, both halves of which are the same memory."""
    driver = HostVmmDriver(layout.plane_bytes, PAGE_BYTES)
    extents = layout.plane_extents
    pool = ExtentPool(
        driver,
        num_extents=2 * extents,
        extent_bytes=layout.extent_bytes,
        mirrors={at: extents + at for at in range(extents)},
    )
    pool.use(range(extents))
    assert driver.physical().measured_bytes == layout.plane_bytes
    yield driver.tensor(pool.base_va, 2 * layout.plane_bytes, None).view(-1, layout.row_bytes)
    pool.close()
    assert driver.physical().measured_bytes == 0
    driver.close()


SHAPES = [
    KvShape(num_kv_heads=8, key_dim=16, value_dim=16, dtype="bfloat16"),
    KvShape(num_kv_heads=3, key_dim=64, value_dim=5, dtype="float32"),
    KvShape(num_kv_heads=1, key_dim=7, value_dim=9, dtype="int8"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@QUIET
@given(steps=st.lists(st.integers(0, 40), min_size=4, max_size=60), seed=st.integers(0, 99))
def test_windows_are_what_concatenation_gives(shape: KvShape, steps: list[int], seed: int) -> None:
    """Of any length and boundary still there, in one piece, over many times round."""
    need = RingNeed(
        page_tokens=7,
        cells=5,
        num_layers=1,
        width_bytes=shape.bytes_per_token_layer,
        window_tokens=25,
        step_tokens=3,
    )
    generator = torch.Generator().manual_seed(seed)
    layout = choose_ring_layout(need, extent_bytes=PAGE_BYTES)
    with double_mapped(layout) as memory:
        rings = [MirrorRing(part) for part in keys_values(memory, shape)]
        assert rings[0].capacity_tokens == layout.rows
        whole = [torch.zeros(0, *part.shape[1:], dtype=part.dtype) for part in parts(rings)]
        # Scaled up, so that the walk goes round however long the ring is.
        scale = -(-4 * layout.rows // (sum(steps) + 1))
        for step in steps:
            count = min(step * scale, layout.rows)
            for index, ring in enumerate(rings):
                like = whole[index]
                new = torch.randint(-99, 99, (count, *like.shape[1:]), generator=generator)
                ring.append(new.to(like.dtype))
                whole[index] = torch.cat([like, new.to(like.dtype)])
            held = min(layout.rows, len(whole[0]))
            cut = int(torch.randint(0, held + 1, (), generator=generator))
            boundary = len(whole[0]) - cut
            for ring, reference in zip(rings, whole, strict=True):
                for at, size in [(boundary, held - cut), (boundary, min(3, held - cut))]:
                    assert torch.equal(ring.window(at, size), reference[at - size : at])
                found = ring.last(held)
                assert torch.equal(found, reference[len(reference) - held :])
        half = layout.rows
        assert torch.equal(memory[:half], memory[half:])
        del rings, ring, found, memory


def parts(rings: list[MirrorRing]) -> list[torch.Tensor]:
    """An empty tensor of each ring's type."""
    return [ring.last(0) for ring in rings]


def test_a_window_over_the_seam_is_the_memory_itself() -> None:
    """One stride, no copy; a write through it shows at the other end."""
    need = RingNeed(page_tokens=4, cells=4, num_layers=1, width_bytes=512, window_tokens=16)
    layout = choose_ring_layout(need, extent_bytes=PAGE_BYTES)
    with double_mapped(layout) as memory:
        ring = MirrorRing(memory.view(torch.bfloat16).view(-1, 4, 64))
        ring.append(torch.ones(layout.rows - 1, 4, 64, dtype=torch.bfloat16))
        ring.append(torch.full((2, 4, 64), 2.0, dtype=torch.bfloat16))

        window = ring.last(5)

        assert window.is_contiguous()
        assert window.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
        window[-1] = 3.0
        assert memory[0].view(torch.bfloat16)[0] == 3.0
        assert window[:, 0, 0].tolist() == [1, 1, 1, 2, 3]
        del ring, window, memory


def test_what_is_not_there_is_refused() -> None:
    """Overwritten tokens, tokens to come, rows of another kind; and nothing changes."""
    ring = MirrorRing(torch.zeros(8, 2), num_tokens=6)
    for boundary, count in [(7, 1), (6, 5), (3, 2), (6, -1), (1, 1)]:
        with pytest.raises(ValueError, match="are not among"):
            ring.window(boundary, count)
    for wrong in (torch.ones(5, 2), torch.ones(1, 1), torch.ones(1, 2, dtype=torch.float64)):
        with pytest.raises(ValueError, match="with 1 to 4 along axis 0"):
            ring.append(wrong)
    assert ring.num_tokens == 6
    assert not ring.last(4).any()
    with pytest.raises(ValueError, match="two halves"):
        MirrorRing(torch.zeros(3, 2))


def test_heads_may_come_first() -> None:
    """As Transformers has its states: the same memory, cut along another axis."""
    rows = torch.zeros(16, 3, 5)
    rows_first = MirrorRing(rows)
    rows_first.append(torch.ones(2, 3, 5))
    heads_first = rows_first.heads_first()
    new = torch.randn(1, 3, 4, 5)

    heads_first.append(new)

    assert heads_first.num_tokens == 6
    assert torch.equal(heads_first.last(4), new)
    assert torch.equal(rows[2:6], new[0].transpose(0, 1))
    with pytest.raises(ValueError, match="with 1 to 8 along axis 2"):
        heads_first.append(torch.zeros(1, 3, 9, 5))
    with pytest.raises(ValueError, match="with 1 to 8 along axis 2"):
        heads_first.append(torch.zeros(1, 2, 4, 5))
