"""Where the pages of a compiled plan lie in the arena's one range.

Each class gets a stretch of extents: a *pool*, of slots any of which can hold any page, or
*rings*, in each of which the pages of one tenant follow one another, mapped twice in a
row.  A slot of a pool holds a page in all its layers, one after the other; a ring has a
plane for each layer, or for a few.

Addresses cost nothing, so a stretch has them for the most that there can be.  What rounding
to whole extents costs in memory, if all of it is used, is in the table of the layout.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from actors.arena.heap import ALIGNMENT_BYTES
from actors.arena.ring import RingLayout, RingNeed, choose_ring_layout
from policies.retention.plan import Plan, PlannedClass
from policies.retention.program import KvShape
from policies.retention.synthesis import Arena as ChunkArena
from policies.retention.synthesis import ChunkEnd, Periodic

VERSIONS_PER_REQUEST = 2
"""Recurrent states per request: the one being read and the one being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionSpec:
    """What pools and rings have in common."""

    class_index: int
    """Of the plan."""

    name: str
    layers: tuple[int, ...]
    """As the model numbers them."""

    page_tokens: int
    width_bytes: int
    """Bytes of one token in one layer."""

    shape: KvShape | None
    extent_bytes: int
    first_extent: int
    layer_index: Mapping[int, int] = field(init=False, repr=False, compare=False)
    """Of each of the layers, its place among them."""

    def __post_init__(self) -> None:
        places = {layer: index for index, layer in enumerate(self.layers)}
        object.__setattr__(self, "layer_index", places)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all its layers."""
        return self.page_tokens * self.width_bytes * len(self.layers)

    def index_of(self, layer: int) -> int:
        """Place of a layer among the layers of the class.

        Raises
        ------
        ValueError
            If it has no such layer.
        """
        index = self.layer_index.get(layer)
        if index is None:
            raise ValueError(f"class {self.name!r} has layers {self.layers}, got {layer}")
        return index

    def need_shape(self) -> KvShape:
        """The shape of the keys and values.

        Raises
        ------
        ValueError
            If the class is only bytes.
        """
        if self.shape is None:
            raise ValueError(f"class {self.name!r} has no keys and values of a known shape")
        return self.shape


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec(RegionSpec):
    """Slots for pages that may lie anywhere; a slot may lie across two extents."""

    num_slots: int

    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next."""
        return -(-self.page_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    @property
    def num_extents(self) -> int:
        """Extents of addresses."""
        return -(-self.num_slots * self.slot_bytes // self.extent_bytes)

    @property
    def full_bytes(self) -> int:
        """Memory if every slot is used."""
        return self.num_extents * self.extent_bytes

    @property
    def needed_bytes(self) -> int:
        """Bytes of all the pages."""
        return self.num_slots * self.page_bytes

    @property
    def mirrors(self) -> dict[int, int]:
        """None."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSpec(RegionSpec):
    """Rings, one per tenant at a time."""

    layout: RingLayout
    num_rings: int

    @property
    def num_slots(self) -> int:
        """Cells of all rings."""
        return self.num_rings * self.layout.cells

    @property
    def num_extents(self) -> int:
        """Extents of addresses: each plane has them twice."""
        return self.num_rings * self.layout.num_planes * 2 * self.layout.plane_extents

    @property
    def full_bytes(self) -> int:
        """Memory if every ring is used."""
        return self.num_rings * self.layout.ring_bytes

    @property
    def needed_bytes(self) -> int:
        """Bytes that the queries of one step of each tenant read."""
        return self.num_rings * self.layout.need.seen_bytes

    @property
    def mirrors(self) -> dict[int, int]:
        """Where each extent is seen again."""
        length = self.layout.plane_extents
        starts = range(self.first_extent, self.first_extent + self.num_extents, 2 * length)
        return {at: at + length for start in starts for at in range(start, start + length)}

    def plane_extent(self, ring: int, plane: int) -> int:
        """Where a plane begins."""
        nth = ring * self.layout.num_planes + plane
        return self.first_extent + nth * 2 * self.layout.plane_extents


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRow:
    """One class's line in the table of a layout."""

    name: str
    kind: str
    """``pool`` or ``rings``."""

    num_slots: int
    reserved_bytes: int
    """Addresses, mirrors included."""

    needed_bytes: int
    """Of the pages; for rings, of the tokens that one step reads."""

    full_bytes: int
    """Memory if all of it is used."""

    pad_bytes: int
    """Of a ring's row, or of a slot: what is left empty so that the next begins well."""

    layers_per_row: int

    @property
    def over_allocation(self) -> float:
        """Memory over need; at least 1."""
        return self.full_bytes / self.needed_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HotLayout:
    """Regions side by side, from the first extent on."""

    extent_bytes: int
    regions: tuple[PoolSpec | RingSpec, ...]

    def __post_init__(self) -> None:
        at = self.regions[0].first_extent if self.regions else 0
        for region in self.regions:
            if region.first_extent != at or region.extent_bytes != self.extent_bytes:
                raise ValueError(f"region {region.name!r} does not begin at extent {at}")
            at += region.num_extents

    @property
    def num_extents(self) -> int:
        """Extents of addresses."""
        return sum(region.num_extents for region in self.regions)

    @property
    def mirrors(self) -> dict[int, int]:
        """Of all regions."""
        return {at: to for region in self.regions for at, to in region.mirrors.items()}

    def behind(self, num_extents: int) -> HotLayout:
        """The same, that many extents further on."""
        moved = (replace(it, first_extent=it.first_extent + num_extents) for it in self.regions)
        return replace(self, regions=tuple(moved))

    def table(self) -> tuple[RegionRow, ...]:
        """What each class takes, in memory and addresses."""
        return tuple(_row_of(region) for region in self.regions)


def plan_hot_layout(
    plan: Plan,
    *,
    extent_bytes: int,
    num_requests: int,
    context_tokens: int,
    rings: bool | Collection[str] = True,
    spare_rings: int = 1,
    steps_in_flight: int = 1,
    pages: Mapping[str, int] | None = None,
    max_layers_per_row: int | None = None,
) -> HotLayout:
    """Lay out the classes of ``plan``.

    Parameters
    ----------
    num_requests
        Most requests at a time.
    context_tokens
        Most tokens of each.
    rings
        Classes that get rings: all whose cells come round (true), none, or those named.
    spare_rings
        Rings beyond one per request, into which a request can move.
    steps_in_flight
        Steps of a request whose work may be running when the next is prepared.  What they
        read is in its cells until then, so a ring has cells for that many more.
    pages
        ``{class: slots}`` where a pool is to have other than the most that the requests
        can hold by themselves.
    max_layers_per_row
        See `choose_ring_layout`.

    Raises
    ------
    ValueError
        If a size is not positive, or a class cannot have what is asked for it.
    """
    pages = pages or {}
    if spare_rings < 0 or steps_in_flight < 0:
        raise ValueError(f"need no negative numbers, got {spare_rings} and {steps_in_flight}")
    sizes = {"num_requests": num_requests, "context_tokens": context_tokens, **pages}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    ringed = _ringed(plan, rings)
    _need_classes(plan, pages.keys() - ringed, "a pool", pages.keys() & ringed)
    regions: list[PoolSpec | RingSpec] = []
    at = 0
    for index, found in enumerate(plan.classes):
        common = RegionSpec(
            class_index=index,
            name=found.name,
            layers=found.layers,
            page_tokens=found.page_tokens,
            width_bytes=found.width_bytes,
            shape=found.shape,
            extent_bytes=extent_bytes,
            first_extent=at,
        )
        region: PoolSpec | RingSpec
        if found.name in ringed:
            layout = choose_ring_layout(
                ring_need(found, plan.step_tokens, steps_in_flight),
                extent_bytes=extent_bytes,
                max_layers_per_row=max_layers_per_row,
            )
            region = RingSpec(
                **_fields(common), layout=layout, num_rings=num_requests + spare_rings
            )
        else:
            most = num_requests * _pages_per_request(found, context_tokens)
            region = PoolSpec(**_fields(common), num_slots=pages.get(found.name, most))
        regions.append(region)
        at += region.num_extents
    return HotLayout(extent_bytes=extent_bytes, regions=tuple(regions))


def may_ring(found: PlannedClass) -> bool:
    """Whether the cells of a class come round, so that a ring can hold them."""
    return isinstance(found.address, Periodic | ChunkArena)


def ring_need(found: PlannedClass, step_tokens: int, steps_in_flight: int = 1) -> RingNeed:
    """What a ring of a class whose cells come round must have room for."""
    window = None
    if not isinstance(found.retirement, ChunkEnd):
        window = 1 + max(0, found.region.reach or 0)
    return RingNeed(
        page_tokens=found.page_tokens,
        cells=found.address.cells or 1,
        num_layers=len(found.layers),
        width_bytes=found.width_bytes,
        window_tokens=window,
        step_tokens=step_tokens,
        late_pages=-(-steps_in_flight * step_tokens // found.page_tokens),
    )


def _fields(spec: RegionSpec) -> dict[str, Any]:
    return {f.name: getattr(spec, f.name) for f in fields(spec) if f.init}


def _ringed(plan: Plan, rings: bool | Collection[str]) -> set[str]:
    """Names of the classes that get rings."""
    able = {found.name for found in plan.classes if may_ring(found)}
    if isinstance(rings, bool):
        return able if rings else set()
    wanted = set(rings)
    _need_classes(plan, wanted, "rings", wanted - able)
    return wanted


def _need_classes(plan: Plan, names: Collection[str], what: str, unfit: Collection[str]) -> None:
    known = {found.name for found in plan.classes}
    wrong = sorted({*unfit, *(set(names) - known)})
    if wrong:
        raise ValueError(f"classes {wrong} cannot have {what}; there are {sorted(known)}")


def _pages_per_request(found: PlannedClass, context_tokens: int) -> int:
    """The most pages that one request holds, by itself, at once."""
    if found.kind == "recurrent":
        return VERSIONS_PER_REQUEST
    start, stop = found.pages_at(context_tokens)
    cells = found.address.cells
    return max(1, stop - start if cells is None else min(stop - start, cells))


def _row_of(region: PoolSpec | RingSpec) -> RegionRow:
    is_pool = isinstance(region, PoolSpec)
    return RegionRow(
        name=region.name,
        kind="pool" if is_pool else "rings",
        num_slots=region.num_slots,
        reserved_bytes=region.num_extents * region.extent_bytes,
        needed_bytes=region.needed_bytes,
        full_bytes=region.full_bytes,
        pad_bytes=(
            region.slot_bytes - region.page_bytes
            if isinstance(region, PoolSpec)
            else region.layout.pad_bytes
        ),
        layers_per_row=region.layout.layers_per_row if isinstance(region, RingSpec) else 1,
    )
