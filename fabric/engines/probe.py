"""Find out by one short run how a model rotates its keys.

Configurations and class names say how keys *should* be rotated; whether pairs are halves
or neighbours, which layers have which frequencies, and which have none, is spread over
each model's source.  So we ask the model itself:

1. Every layer is given the same input at every position (`constant_inputs`).  What it
   caches then differs between positions by the rotation and by nothing else.
2. The frequencies are those of the model's own rotary modules (`rotary_candidates`).
3. The right ones, paired the right way, leave keys that are the same at every position
   (`fit_rotary`).  If none do, the model is refused: fail closed.

Tables of cosines and sines are rounded to the data type of the keys, or kept in 32 bits where
that leaves clearly less to see (OLMo, ERNIE 4.5).  Frequencies that change with the length of
the sequence are taken as they are at first; the run stays within the length they hold for,
and so does the spec.

Values must be the same at every position as they are.  This module knows PyTorch only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

import torch
from torch import nn

from codec.errors import UnsupportedModelError
from codec.rope import CHANGING_ROPE_TYPES, RotarySpec, Style, check_static

_POSITIONS: Final = (0, 1, 2, 3, 5, 11, 29, 101, 503, 2003, 7919)
"""Small ones tell high frequencies apart, large ones low frequencies."""

TOLERANCES: Final[Mapping[torch.dtype, float]] = {
    torch.float32: 1e-3,
    torch.float16: 1e-2,
    torch.bfloat16: 3e-2,
}
"""Largest relative spread that counts as the same at every position.

On SmolLM2, Gemma-3 and ten families of random models the right frequencies gave at most
2e-7, 3e-4 and 3e-3, and any others 9e-2 or more (CPU, tests/fabric/engines, 2026-11-30)."""


_CLEARLY_BETTER: Final = 0.9
"""Spread of all layers with tables in 32 bits over that with rounded ones, at most.

It was 0.84 and 0.85 where tables are in 32 bits, and 1.07 or more in ten families where they
are not (random models of 4 layers, both data types, tests/fabric/engines, 2026-11-30).  Of one
layer alone it may be 0.93 by chance; to miss 32 bits costs what the keys lost, once more."""


@dataclass(frozen=True, slots=True)
class RotaryCandidate:
    """Frequencies that a rotary module of the model holds."""

    inv_freq_F: tuple[float, ...]
    attention_scaling: float
    rope_type: str

    max_positions: int | None = None
    """Positions the model accepts; None if the module does not say."""

    original_positions: int | None = None
    """Those it was first trained on, where the scaling names them."""

    @property
    def bound(self) -> int | None:
        """Longest sequence they hold for, or None; an error as of `check_static`."""
        return check_static(
            self.rope_type,
            max_positions=self.max_positions,
            original_positions=self.original_positions,
        )


@dataclass(frozen=True, slots=True)
class _Fit:
    """How well one way to undo the rotation does on one layer."""

    spread: float
    candidate: RotaryCandidate | None
    style: Style


def probe_positions(max_positions: int, candidates: Sequence[RotaryCandidate] = ()) -> list[int]:
    """Positions to run a probe at: within the model, and within what ``candidates`` hold for."""
    bounds = [
        bound
        for candidate in candidates
        if candidate.rope_type in CHANGING_ROPE_TYPES
        for bound in (candidate.max_positions, candidate.original_positions)
        if bound
    ]
    return [position for position in _POSITIONS if position < min([max_positions, *bounds])]


@contextmanager
def constant_inputs(model: nn.Module) -> Iterator[None]:
    """Within it, each layer of ``model`` sees its first position's input at every position."""

    def hold(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        if "hidden_states" in kwargs:
            kwargs = kwargs | {"hidden_states": _first_everywhere(kwargs["hidden_states"])}
        elif args:
            args = (_first_everywhere(args[0]), *args[1:])
        return args, kwargs

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                handle = module.register_forward_pre_hook(hold, with_kwargs=True)
                stack.callback(handle.remove)
        yield


def rotary_candidates(model: nn.Module) -> list[RotaryCandidate]:
    """Frequencies of every rotary module in ``model``, in order of the modules.

    A module has one buffer ``inv_freq``, or one ``<kind>_inv_freq`` for each kind of layer.
    Scalings that change it keep the first ones beside it, and those are taken.
    """
    found = []
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if not name.endswith("inv_freq") or name.endswith("original_inv_freq"):
                continue
            found.append(_candidate(module, name.removesuffix("inv_freq"), buffer))
    return found


def fit_rotary(
    keys_TLHD: torch.Tensor,
    values_TLHD: torch.Tensor,
    positions: Sequence[int],
    candidates: Sequence[RotaryCandidate],
    *,
    name: str,
) -> RotarySpec:
    """Choose each layer's frequencies so that its undone keys do not depend on the position.

    Parameters
    ----------
    keys_TLHD, values_TLHD
        What the model cached under `constant_inputs`.
    positions
        Where, in order: one for each ``T``.
    candidates
        What to choose from; "not rotated" is always tried as well.
    name
        The model's name for error messages.

    Returns
    -------
    rotary
        Bounded where frequencies that fit some layer hold up to a length only, even if
        others that do not change happen to be equal up to there.

    Raises
    ------
    UnsupportedModelError
        If values depend on the position, no candidate fits a layer, frequencies that fit
        may change nobody knows when, or the layers do not agree on pairing and width.
    """
    tolerance = TOLERANCES[keys_TLHD.dtype]
    for layer, spread in enumerate(_spreads(values_TLHD.float())):
        if not spread <= tolerance:
            raise UnsupportedModelError(
                f"{name} layer {layer}", "its cached values depend on the position"
            )
    fits_NL = _fits(keys_TLHD, torch.tensor(positions), candidates)
    chosen: list[_Fit] = []
    bounds: list[int] = []
    for layer in range(keys_TLHD.shape[1]):
        fitting = [fits_L[layer] for fits_L in fits_NL if fits_L[layer].spread <= tolerance]
        if not fitting:
            for candidate in candidates:
                _ = candidate.bound  # a scaling that is not known says more than that none fits
            raise UnsupportedModelError(
                f"{name} layer {layer}",
                "its keys are not turned by any of the model's rotary frequencies",
            )
        bounds += [fit.candidate.bound or sys.maxsize for fit in fitting if fit.candidate]
        chosen.append(min(fitting, key=lambda fit: fit.spread))
    rotary = _join(chosen, _dtype_name(keys_TLHD.dtype), name)
    rotary = _with_tables(rotary, keys_TLHD, torch.tensor(positions))
    bound = min(bounds, default=sys.maxsize)
    return replace(rotary, max_positions=bound) if bound < sys.maxsize else rotary


def _candidate(module: nn.Module, kind: str, inv_freq_F: torch.Tensor) -> RotaryCandidate:
    """What ``module`` uses for one ``kind`` of layer, whose name ends in ``_`` or is empty."""
    rope_type = getattr(module, "rope_type", "default")
    if isinstance(rope_type, dict):
        rope_type = rope_type[kind.removesuffix("_")]
    if rope_type in CHANGING_ROPE_TYPES:
        # What it uses now may be left over from a longer sequence.
        inv_freq_F = getattr(module, f"{kind}original_inv_freq", inv_freq_F)
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    parameters = parameters.get(kind.removesuffix("_"), parameters)
    return RotaryCandidate(
        inv_freq_F=tuple(inv_freq_F.detach().to("cpu", torch.float32).flatten().tolist()),
        attention_scaling=float(getattr(module, f"{kind}attention_scaling", 1.0)),
        rope_type=rope_type,
        max_positions=getattr(module, "original_max_seq_len", None),
        original_positions=parameters.get("original_max_position_embeddings"),
    )


def _fits(
    keys_TLHD: torch.Tensor, positions_T: torch.Tensor, candidates: Sequence[RotaryCandidate]
) -> list[list[_Fit]]:
    """For every way to undo the rotation, starting with none, how well each layer takes it."""
    fits_NL = [[_Fit(spread, None, "half") for spread in _spreads(keys_TLHD.float())]]
    for candidate in dict.fromkeys(candidates):
        if 2 * len(candidate.inv_freq_F) > keys_TLHD.shape[3]:
            continue
        for style in get_args(Style):
            spec = RotarySpec.uniform(
                candidate.inv_freq_F,
                num_layers=keys_TLHD.shape[1],
                attention_scaling=candidate.attention_scaling,
                style=style,
                table_dtype=_dtype_name(keys_TLHD.dtype),
            )
            spreads = _spreads(spec.unrotate(keys_TLHD, positions_T))
            fits_NL.append([_Fit(spread, candidate, style) for spread in spreads])
    return fits_NL


def _join(fits: Sequence[_Fit], table_dtype: str, name: str) -> RotarySpec:
    """One spec of every layer's choice; layers that do not rotate turn by nothing."""
    turning = [fit for fit in fits if fit.candidate is not None]
    styles: set[Literal["half", "interleaved"]] = {fit.style for fit in turning}
    widths = {len(fit.candidate.inv_freq_F) for fit in turning if fit.candidate}
    if len(styles) > 1 or len(widths) > 1:
        raise UnsupportedModelError(name, "its layers rotate keys in different ways")
    still = (0.0,) * (widths.pop() if widths else 1)
    return RotarySpec(
        inv_freq_LF=tuple(fit.candidate.inv_freq_F if fit.candidate else still for fit in fits),
        attention_scaling_L=tuple(
            fit.candidate.attention_scaling if fit.candidate else 1.0 for fit in fits
        ),
        style=styles.pop() if styles else "half",
        table_dtype=table_dtype,
    )


def _with_tables(
    rotary: RotarySpec, keys_TLHD: torch.Tensor, positions_T: torch.Tensor
) -> RotarySpec:
    """``rotary`` with tables in 32 bits, if that fits all layers together clearly better."""
    in_32_bits = replace(rotary, table_dtype="float32")
    spread, spread_in_32_bits = (
        sum(value * value for value in _spreads(spec.unrotate(keys_TLHD, positions_T)))
        for spec in (rotary, in_32_bits)
    )
    return in_32_bits if spread_in_32_bits < _CLEARLY_BETTER**2 * spread else rotary


def _spreads(states_TLHD: torch.Tensor) -> list[float]:
    """Root of the variance over positions, relative to the size; nan where that is zero."""
    deviation = states_TLHD - states_TLHD.mean(dim=0, keepdim=True)
    spread_L: list[float] = (
        deviation.square().sum(dim=(0, 2, 3)).sqrt()
        / states_TLHD.square().sum(dim=(0, 2, 3)).sqrt()
    ).tolist()
    return spread_L


def _first_everywhere(states: torch.Tensor) -> torch.Tensor:
    """``states``, shape ``(1, T, ...)``, with position 0 at every position."""
    return states[:, :1].expand_as(states).contiguous()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
