"""Part the state of a program into retention classes: one per retirement predicate.

1. States whose keys die alike, of one width and one head range, become one group of layers.
2. The key axis of a group is parted into *regions*, each with one way to die:

   * ``sink``: a prefix of which something is read forever.  It is rounded up to whole pages;
     the few keys that this keeps too long stay exact in every count of live tokens.
   * ``early``: a prefix that outlives the tail behind it, but ends.
   * ``global``: keys that are read forever among others that are not, such as every m-th.
     They are *ranked*: their pages hold consecutive members, not consecutive positions.
   * ``local``: everything else that is read.

3. Keys that nothing reads belong to no region, and take no room.

A layer belongs to several classes only through its head ranges (`program` checks that they
are disjoint) or through the regions of one state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from policies.retention.claims import Claim, Forever, Unread, Until
from policies.retention.ir import Relation
from policies.retention.lifetime import Lifetime, infer
from policies.retention.program import AttentionState, HeadRange, KvShape, Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Pages of a group of layers that die by one rule."""

    role: str
    """``whole``, ``sink``, ``early``, ``global`` or ``local``."""

    claims: tuple[Claim, ...]
    """Every key of these pages that is read at all."""

    is_ranked: bool = False
    """Whether pages count members of the only claim rather than positions."""

    first_page: int = 0
    stop_page: int | None = None
    """One past the last page; nothing if there is no last."""

    @property
    def reach(self) -> int | None:
        """Greatest distance from a key to its last reader; nothing if there is none."""
        found = [claim_reach(claim) for claim in self.claims]
        known = [reach for reach in found if reach is not None]
        return max(known) if len(known) == len(found) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionClass:
    """Layers and keys that share a retirement predicate."""

    name: str
    sources: tuple[str, ...]
    """Names of the states it comes from."""

    layers: tuple[int, ...]
    heads: HeadRange | None
    bytes_per_token_layer: int
    shape: KvShape | None
    region: Region


def claim_reach(claim: Claim) -> int | None:
    """Greatest distance from a key of the claim to its last reader, or a little more."""
    rule, keys = claim.rule, claim.keys
    if not isinstance(rule, Until):
        return None if isinstance(rule, Forever) else 0
    if rule.slope == rule.step:  # every block alike: the earliest key within one counts
        if keys.modulus % rule.step:
            return rule.offset + rule.shift
        within = min((residue + rule.shift) % rule.step for residue in keys.residues)
        return rule.offset + rule.shift - within
    if rule.slope < rule.step:  # the first key, or the one that opens the next block
        first = keys.first_from(0) or 0
        to_next = rule.step - (first + rule.shift) % rule.step
        return rule.last_read(first) - first + max(0, rule.slope - to_next)
    last = None if keys.stop is None else keys.last_before(keys.stop)
    if last is None:
        return None
    return rule.last_read(last) - last + (last + rule.shift) % rule.step


def normalize(
    program: Program, infer_lifetime: Callable[[Relation], Lifetime] = infer
) -> tuple[tuple[RetentionClass, ...], dict[str, Lifetime]]:
    """Classes of the program's attention states, and each state's lifetime by name."""
    lifetimes: dict[str, Lifetime] = {}
    known: dict[Relation, Lifetime] = {}
    groups: dict[object, list[AttentionState]] = {}
    for state in program.attention:
        reads = state.all_reads
        if reads not in known:
            known[reads] = infer_lifetime(reads)
        lifetimes[state.name] = known[reads]
        key = (known[reads].claims, state.heads, state.bytes_per_token_layer, state.shape)
        groups.setdefault(key, []).append(state)
    classes: list[RetentionClass] = []
    for states in groups.values():
        regions = part_regions(lifetimes[states[0].name].claims, program.page_tokens)
        classes += [_class_of(states, region, len(regions) == 1) for region in regions]
    return tuple(classes), lifetimes


def _class_of(states: list[AttentionState], region: Region, is_only: bool) -> RetentionClass:
    first = states[0]
    return RetentionClass(
        name=first.name if is_only else f"{first.name}::{region.role}",
        sources=tuple(state.name for state in states),
        layers=tuple(sorted(layer for state in states for layer in state.layers)),
        heads=first.heads,
        bytes_per_token_layer=first.bytes_per_token_layer,
        shape=first.shape,
        region=region,
    )


def part_regions(claims: tuple[Claim, ...], page_tokens: int) -> list[Region]:
    """Regions of the key axis, first page first."""
    read = [claim for claim in claims if not isinstance(claim.rule, Unread)]
    ends = [claim for claim in read if claim.keys.stop is not None]
    kept = [claim for claim in ends if isinstance(claim.rule, Forever) and claim.keys.is_dense]
    sparse = [
        claim for claim in read if isinstance(claim.rule, Forever) and not claim.keys.is_dense
    ]
    cut = _round_up(max((claim.keys.stop or 0 for claim in kept), default=0), page_tokens)
    regions: list[Region] = []
    if kept:
        start = min(claim.keys.start for claim in kept) // page_tokens
        inside = _clip(read, start * page_tokens, cut)
        regions.append(
            Region(role="sink", claims=inside, first_page=start, stop_page=cut // page_tokens)
        )
    rest = [claim for claim in read if claim not in sparse]
    before = _clip(rest, 0, start * page_tokens) if kept else ()
    regions += _tails(before + _clip(rest, cut, None), page_tokens)
    for index, claim in enumerate(_clip(sparse, cut, None)):
        role = f"global{index + 1}" if index else "global"
        stop = claim.keys.stop
        pages = None if stop is None else -(-claim.keys.below(stop) // page_tokens)
        regions.append(Region(role=role, claims=(claim,), is_ranked=True, stop_page=pages))
    if len(regions) == 1 and regions[0].role == "local":
        only = regions[0]
        regions = [
            Region(
                role="whole",
                claims=only.claims,
                first_page=only.first_page,
                stop_page=only.stop_page,
            )
        ]
    return regions


def _tails(claims: tuple[Claim, ...], page_tokens: int) -> list[Region]:
    """The regions of dense pages behind a sink: one, or two if a prefix outlives the rest."""
    if not claims:
        return []
    ends = tuple(claim for claim in claims if claim.keys.stop is not None)
    tail = tuple(claim for claim in claims if claim.keys.stop is None)
    if not ends or not tail or not _outlives(ends, tail):
        return [_dense("local", claims, page_tokens)]
    cut = _round_up(max(claim.keys.stop or 0 for claim in ends), page_tokens)
    early = _dense("early", _clip(claims, 0, cut), page_tokens)
    behind = _clip(claims, cut, None)
    return [early, _dense("local", behind, page_tokens)]


def _outlives(ends: tuple[Claim, ...], tail: tuple[Claim, ...]) -> bool:
    """Whether a prefix needs more cells than the tail; a tail that grows needs the most."""
    tail_reach = Region(role="local", claims=tail).reach
    ends_reach = Region(role="early", claims=ends).reach
    if tail_reach is None:
        return True  # the prefix ends, so it need not grow with the rest
    return ends_reach is not None and ends_reach > tail_reach


def _dense(role: str, claims: tuple[Claim, ...], page_tokens: int) -> Region:
    stops = [claim.keys.stop for claim in claims]
    known = [stop for stop in stops if stop is not None]
    return Region(
        role=role,
        claims=claims,
        first_page=min(claim.keys.start for claim in claims) // page_tokens,
        stop_page=-(-max(known) // page_tokens) if len(known) == len(stops) else None,
    )


def _clip(
    claims: list[Claim] | tuple[Claim, ...], start: int, stop: int | None
) -> tuple[Claim, ...]:
    parts = ((claim.keys.clip(start, stop), claim.rule) for claim in claims)
    return tuple(Claim(keys, rule) for keys, rule in parts if keys is not None)


def _round_up(tokens: int, page_tokens: int) -> int:
    return -(-tokens // page_tokens) * page_tokens
