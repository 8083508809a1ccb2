"""What memory a model's real keys and values take: stored in an arena, read back, measured.

Some requests store the same captured tokens, step by step, as an engine would after a
prefill; then what a next query may read is read back and compared, and the bytes that the
driver holds are measured.  The same tokens under another plan, such as one in which every
layer keeps everything, give the bytes to compare with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from actors.arena.arena import Arena
from actors.arena.driver_host import HostVmmDriver
from actors.arena.hot_pages import HotPages
from actors.arena.layout import plan_hot_layout
from actors.arena.table.steps import StepItem
from policies.retention.plan import Plan, compile_program
from policies.retention.program import AttentionState, Program
from policies.retention.text import parse_relation

DOMAIN = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosted:
    """What it took to hold some requests."""

    num_requests: int
    num_tokens: int
    physical_bytes: int
    """Measured at the end, by the kernel's count of the memory file's blocks."""

    peak_bytes: int
    """The most that was committed on the way."""

    live_bytes: int
    """Of the tokens that a next query may read: the least that could hold them."""

    num_compared: int
    """Tokens, times layers, that were read back and were what had been stored."""


def keeping_everything(program: Program) -> Program:
    """The same state, none of which is ever dead: what a pool of full pages holds."""
    states = (
        replace(state, reads=parse_relation("true")) if isinstance(state, AttentionState) else state
        for state in program.states
    )
    return replace(program, states=tuple(states))


def host(
    program: Program,
    keys_TLHD: torch.Tensor,
    values_TLHD: torch.Tensor,
    *,
    num_requests: int,
    step_tokens: int,
    rings: bool = True,
    extent_bytes: int = 2 << 20,
) -> Hosted:
    """Store the tokens ``num_requests`` times, compare, measure, and give everything back.

    Parameters
    ----------
    program
        Of states with shapes; layer ``l`` of it is ``[:, l]`` of the tensors.
    rings
        Whether windows get mirrored rings, or pools of pages.

    Raises
    ------
    AssertionError
        If a token that may be read is not there, or is not what was stored.
    """
    plan = compile_program(program, step_tokens=step_tokens)
    layout = plan_hot_layout(
        plan,
        extent_bytes=extent_bytes,
        num_requests=num_requests,
        context_tokens=len(keys_TLHD),
        rings=rings,
    )
    budget_bytes = sum(row.full_bytes for row in layout.table()) + extent_bytes
    driver = HostVmmDriver(budget_bytes, extent_bytes)
    arena = Arena(driver, capacity_bytes=extent_bytes, extent_bytes=extent_bytes, hot=layout)
    hot = HotPages(arena, plan)
    requests = [hot.table.open() for _ in range(num_requests)]
    for before in range(0, len(keys_TLHD), step_tokens):
        after = min(before + step_tokens, len(keys_TLHD))
        for request in requests:
            _store(hot, program, request, keys_TLHD[before:after], values_TLHD[before:after])
    hot.table.reclaim()
    arena.trim()
    hosted = Hosted(
        num_requests=num_requests,
        num_tokens=len(keys_TLHD),
        physical_bytes=driver.physical().measured_bytes,
        peak_bytes=arena.stat().peak_committed_bytes,
        live_bytes=num_requests * plan.live_bytes(len(keys_TLHD)),
        num_compared=_compare(hot, plan, requests, keys_TLHD, values_TLHD),
    )
    for request in requests:
        hot.table.release(request)
    arena.close()
    driver.close()
    return hosted


def _layers(program: Program) -> list[int]:
    return sorted(layer for state in program.attention for layer in state.layers)


def _store(
    hot: HotPages, program: Program, request: int, keys: torch.Tensor, values: torch.Tensor
) -> None:
    before = hot.table.boundary(request)
    item = StepItem(request=request, before=before, after=before + len(keys))
    (step,) = hot.table.prepare([item])
    (seq,) = hot.table.commit([hot.carry_out(step)], DOMAIN)
    for layer in _layers(program):
        hot.store(step, layer, keys[:, layer], values[:, layer])
    hot.table.complete({DOMAIN: [seq]})


def _compare(
    hot: HotPages, plan: Plan, requests: list[int], keys: torch.Tensor, values: torch.Tensor
) -> int:
    num_compared = 0
    for request in requests:
        for layer in _layers(plan.program):
            found = hot.gather(request, layer)
            wanted = {
                position
                for planned in plan.classes
                if layer in planned.layers
                for claimed in planned.live_claims(len(keys))
                for position in claimed.walk(0, len(keys))
            }
            assert found.keys() == wanted, f"layer {layer} has other tokens than may be read"
            for position, (key, value) in found.items():
                assert torch.equal(key, keys[position, layer]), (layer, position)
                assert torch.equal(value, values[position, layer]), (layer, position)
            num_compared += len(found)
    return num_compared
