"""Gradients of the cache agree with finite differences of the likelihood itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from codec.errors import ConfigError
from fabric.engines import sensitivity
from fabric.engines.loading import LoadedModel
from fabric.engines.sensitivity import CacheGradients, cache_gradients
from fabric.engines.transformers import TransformersEngine
from tests.fabric.engines.tiny import WINDOW, some_tokens, tiny_model

CONTEXT, FOLLOWING = 24, 9
TOKENS = some_tokens(CONTEXT + FOLLOWING)


def engine_and_model(name: str) -> tuple[TransformersEngine, Any]:
    """A tiny engine, and the model inside."""
    model = tiny_model(name)
    return TransformersEngine(LoadedModel(model, None, name, f"weights of {name}")), model


def gradients(engine: TransformersEngine, model: Any, *, seed: int = 3) -> CacheGradients:
    """Of the context of `TOKENS`."""
    return cache_gradients(
        engine,
        model,
        TOKENS,
        num_context=CONTEXT,
        generator=torch.Generator().manual_seed(seed),
    )


def drawn_targets(engine: TransformersEngine, model: Any, *, seed: int = 3) -> torch.Tensor:
    """Targets that the same generator draws from an unchanged run, one per following token."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0, CONTEXT:]
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(logits.float().softmax(-1), 1, generator=generator)


def likelihood(
    engine: TransformersEngine, keys: torch.Tensor, values: torch.Tensor, drawn: torch.Tensor
) -> float:
    """Log likelihood of the targets after a context with these unrotated keys and values."""
    rotated = engine.rotary.rotate(keys, torch.arange(CONTEXT))
    cache = engine.restore(rotated, values)
    logits = engine.score(TOKENS[: CONTEXT + 1], cache, [*TOKENS[CONTEXT + 1 :], 1])
    return float(logits.double().log_softmax(-1).gather(1, drawn).sum())


@pytest.mark.parametrize("name", ["llama", "llama-yarn", "gemma3", "gpt-neox"])
@pytest.mark.parametrize("kind", ["keys", "values"])
def test_gradients_are_those_of_finite_differences(name: str, kind: str) -> None:
    """Where they are largest and at random places; scaled, sliding and partial rotations too."""
    engine, model = engine_and_model(name)
    found = gradients(engine, model)
    drawn = drawn_targets(engine, model)
    cache, _ = engine.prefill(TOKENS[:CONTEXT])
    _, values = engine.capture(cache, 0, CONTEXT)
    rows = {"keys": found.keys_TLHD, "values": values}
    gradient = found.key_gradients_TLHD if kind == "keys" else found.value_gradients_TLHD
    draw = torch.Generator().manual_seed(0)
    largest = gradient.abs().flatten().topk(3).indices.tolist()
    chosen = largest + torch.randint(gradient.numel(), (4,), generator=draw).tolist()
    scale = float(gradient.abs().max())
    assert scale > 1e-3

    for place in chosen:
        sides = []
        for step in (0.004, -0.004):
            moved = rows[kind].clone()
            moved.view(-1)[place] += step
            sides.append(likelihood(engine, **(rows | {kind: moved}), drawn=drawn))
        measured = (sides[0] - sides[1]) / 0.008
        assert float(gradient.flatten()[place]) == pytest.approx(measured, abs=0.02 * scale)


def test_a_sliding_layer_reads_its_window_only() -> None:
    """Before it the gradient is zero, within it not; a full layer reads everything."""
    engine, model = engine_and_model("gemma3")

    found = gradients(engine, model)

    size_TL = found.value_gradients_TLHD.abs().amax(dim=(2, 3))
    sliding, full = 0, 2
    assert (size_TL[: CONTEXT - WINDOW + 1, sliding] == 0).all()
    assert (size_TL[CONTEXT - WINDOW + 1 :, sliding] > 0).all()
    assert (size_TL[:, full] > 0).all()


def test_targets_are_drawn_by_the_generator() -> None:
    """An equal seed draws equal ones; another, others."""
    engine, model = engine_and_model("llama")

    first, again, other = (gradients(engine, model, seed=seed) for seed in (1, 1, 2))

    assert torch.equal(first.key_gradients_TLHD, again.key_gradients_TLHD)
    assert not torch.allclose(first.key_gradients_TLHD, other.key_gradients_TLHD)


@pytest.mark.parametrize("fails", [False, True])
def test_parameters_are_left_as_they_were(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that took gradients do again, also after an error; nothing is added to them."""
    engine, model = engine_and_model("llama")
    parameters = list(model.parameters())
    parameters[0].requires_grad_(False)
    before = [parameter.requires_grad for parameter in parameters]
    seen: list[bool] = []
    logits = sensitivity._logits

    def watched(*arguments: Any) -> torch.Tensor:
        seen.append(any(parameter.requires_grad for parameter in parameters))
        if fails:
            raise RuntimeError("out of memory")
        return logits(*arguments)

    monkeypatch.setattr(sensitivity, "_logits", watched)

    if fails:
        with pytest.raises(RuntimeError, match="memory"):
            gradients(engine, model)
    else:
        gradients(engine, model)

    assert seen == [False]
    assert [parameter.requires_grad for parameter in parameters] == before
    assert all(parameter.grad is None for parameter in parameters)


def test_gradients_that_are_not_finite_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to do instead."""
    engine, model = engine_and_model("llama")
    drawn = sensitivity._drawn_likelihood
    monkeypatch.setattr(sensitivity, "_drawn_likelihood", lambda *a: drawn(*a) * float("inf"))

    with pytest.raises(ConfigError, match="not finite"):
        gradients(engine, model)


@pytest.mark.parametrize("num_context", [0, len(TOKENS)])
def test_there_must_be_a_context_and_something_after_it(num_context: int) -> None:
    """Both."""
    engine, model = engine_and_model("llama")

    with pytest.raises(ValueError, match="num_context"):
        cache_gradients(engine, model, TOKENS, num_context=num_context, generator=torch.Generator())
