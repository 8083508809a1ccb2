"""Gradients of what a model predicts with respect to its own cache.

1. A context is prefilled, and restored into a cache whose keys and values are leaves.
2. The tokens that follow it are run with gradients; at each, one target is *drawn from the
   model's own prediction*, not taken from the text.
3. The gradient of the targets' log likelihood is taken, and that of keys turned back: keys
   are a linear map of unrotated keys, and gradients go through its transpose.

What `codec.sensitivity` makes of them is the Fisher information of the cache.  A sliding
layer reads only the end of its context, and its gradient is zero before that.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from codec.errors import ConfigError
from fabric.engines.layers import Cache
from fabric.engines.protocol import Engine
from fabric.engines.transformers import CACHE_ARGUMENTS


@dataclass(frozen=True, kw_only=True)
class CacheGradients:
    """Keys of one context, and gradients of one drawn log likelihood; float32, on the CPU."""

    keys_TLHD: Tensor
    """Unrotated."""

    key_gradients_TLHD: Tensor
    """With respect to unrotated keys."""

    value_gradients_TLHD: Tensor


def cache_gradients(
    engine: Engine[Any],
    model: Any,  # noqa: ANN401 - transformers is untyped
    tokens: Sequence[int],
    *,
    num_context: int,
    generator: torch.Generator,
) -> CacheGradients:
    """Run ``tokens`` and say how their prediction reacts to the cache of the first of them.

    Parameters
    ----------
    model
        The one that ``engine`` runs.  Whether its parameters take gradients is as before
        when this returns or raises.
    num_context
        Tokens whose cache is looked at; those after them are what is predicted from.
    generator
        On the CPU; draws the targets.

    Raises
    ------
    ConfigError
        If a gradient is not finite.
    """
    if not 0 < num_context < len(tokens):
        raise ValueError(f"need 0 < num_context < {len(tokens)}, got {num_context}")
    cache, _ = engine.prefill(tokens[:num_context])
    keys, values = engine.capture(cache, 0, num_context)
    cache = engine.restore(keys, values)
    with _frozen(model), torch.enable_grad():
        leaves = _leaves(cache)
        logits = _logits(model, cache, tokens[num_context:])
        likelihood = _drawn_likelihood(logits, generator)
        gradients = torch.autograd.grad(likelihood, [leaf for pair in leaves for leaf in pair])
    by_kind = [_stacked(gradients[first::2], num_context) for first in range(2)]
    if not all(bool(torch.isfinite(part).all()) for part in by_kind):
        raise ConfigError(
            "the model's gradients are not finite: load it in 32 bits, or use another profile"
        )
    positions = torch.arange(num_context)
    return CacheGradients(
        keys_TLHD=engine.rotary.unrotate(keys, positions),
        # Back by the transpose, which for scaled rotations is not the inverse.
        key_gradients_TLHD=engine.rotary.rotate(by_kind[0], -positions),
        value_gradients_TLHD=by_kind[1],
    )


def _leaves(cache: Cache) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of every layer, made leaves that gradients are taken of."""
    for layer in cache.layers:
        layer.keys = layer.keys.detach().requires_grad_()
        layer.values = layer.values.detach().requires_grad_()
    return [(layer.keys, layer.values) for layer in cache.layers]


def _logits(model: Any, cache: Cache, following: Sequence[int]) -> Tensor:  # noqa: ANN401
    """Logits at each of ``following``, shape ``(tokens, vocabulary)``, float32."""
    parameters = inspect.signature(model.forward).parameters
    argument = next(name for name in CACHE_ARGUMENTS if name in parameters)
    ids = torch.tensor([list(following)], device=model.device)
    output = model(input_ids=ids, use_cache=True, **{argument: cache})
    logits: Tensor = output.logits[0]
    return logits if logits.dtype == torch.float64 else logits.float()


def _drawn_likelihood(logits_TV: Tensor, generator: torch.Generator) -> Tensor:
    """Log likelihood of one target at each token, drawn from the prediction itself."""
    log_TV = logits_TV.log_softmax(dim=-1)
    drawn = torch.multinomial(log_TV.detach().exp().cpu(), 1, generator=generator)
    return log_TV.gather(1, drawn.to(log_TV.device)).sum()


def _stacked(gradients: Sequence[Tensor], num_context: int) -> Tensor:
    """Gradients of all layers, ``(T, L, H, D)``; zero where a layer no longer looks."""
    num_heads, head_dim = gradients[0].shape[1], gradients[0].shape[3]
    result = torch.zeros(num_context, len(gradients), num_heads, head_dim)
    for index, part in enumerate(gradients):
        result[num_context - part.shape[2] :, index] = part[0].transpose(0, 1).float().cpu()
    return result


@contextmanager
def _frozen(model: Any) -> Iterator[None]:  # noqa: ANN401
    """Parameters take no gradients within: nothing is kept for them, and nothing computed."""
    were = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in were:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter, was in were:
            parameter.requires_grad_(was)
