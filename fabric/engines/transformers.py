"""The embedded engine: a Hugging Face causal language model in this process, one sequence.

It serves models all of whose layers cache plain keys and values, over the whole sequence or
over a sliding window.  Everything else holds state that a restore at an arbitrary boundary
cannot bring back exactly, and is refused when the engine is made, naming the layer.  So is a
sequence too long for the rotation of its keys to stay what it was (`RotarySpec.check_length`).

Sliding layers are given a cache that keeps what has left the window: attention sees what
it would see anyway, and the KV of every position can be captured afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch

from codec.errors import BackendUnavailable, UnsupportedModelError
from codec.geometry import KVGeometry
from codec.identity import Namespace
from codec.rope import RotarySpec
from fabric.engines.layers import (
    Cache,
    common_geometry,
    first_position,
    refusal,
    stacked,
    truncate,
)
from fabric.engines.loading import LoadedModel
from fabric.engines.probe import (
    TOLERANCES,
    constant_inputs,
    fit_rotary,
    probe_positions,
    rotary_candidates,
)
from fabric.engines.protocol import OnToken

try:
    from transformers import DynamicCache, GenerationConfig
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
except ImportError as error:
    raise BackendUnavailable("transformers", "run `pip install kvfabric[hf]`") from error

PREFILL_CHUNK_TOKENS: Final = 512
"""Tokens computed at a time: bounds the memory of activations and masks."""

CACHE_ARGUMENTS: Final = ("cache", "past_key_values")
"""Names of the cache in ``forward``: transformers 5.24 has the first, 5.16 the second."""


class KeepingSlidingLayer(DynamicSlidingWindowLayer):  # type: ignore[misc]  # untyped parent
    """A sliding-window layer's cache that forgets nothing.

    Invariant: ``keys`` and ``values`` hold the positions from some first one to
    ``cumulative_length``, and so at least the last ``sliding_window - 1`` there are.
    """

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_args: object,
        **_kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append, and return what attention may see: what the parent returns."""
        keys, values = DynamicLayer.update(self, key_states, value_states)
        num_new = key_states.shape[-2]
        self.cumulative_length += num_new
        # The mask is made for this many, whatever we keep (`get_mask_sizes`).
        visible = self.sliding_window - 1 + num_new
        return keys[..., -visible:, :], values[..., -visible:, :]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens; the sign is transformers'."""
        DynamicLayer.crop(self, tokens_to_remove)
        self.cumulative_length += tokens_to_remove


class TransformersEngine:
    """Runs one loaded model, one sequence at a time: a `fabric.engines.protocol.Engine`.

    The model is the engine's from then on: its settings for generation are replaced by
    greedy ones.  Caches are those of `new_cache`, `prefill` and `restore`.
    """

    def __init__(self, loaded: LoadedModel, *, window_tokens: int = 128) -> None:
        """Check the model's layers, and run it once to learn its geometry and rotation.

        Raises
        ------
        UnsupportedModelError
            If a part of the model's state could not be restored exactly.
        """
        if window_tokens < 1:
            raise ValueError(f"need window_tokens >= 1, got {window_tokens}")
        self._window_tokens = window_tokens
        self._fingerprint = loaded.fingerprint
        self._model = loaded.model
        self._config = self._model.config.get_text_config(decoder=True)
        self._dtype: torch.dtype = self._model.dtype
        parameters = inspect.signature(self._model.forward).parameters
        self._cache_argument = next((n for n in CACHE_ARGUMENTS if n in parameters), "")
        self._may_keep_logits = "logits_to_keep" in parameters
        self._check_supported("position_ids" in parameters)
        self._geometry, self._rotary = self._probe()
        self._model.generation_config = _greedy(self._model.generation_config)

    @property
    def geometry(self) -> KVGeometry:
        """Shape of the whole model's cache."""
        return self._geometry

    @property
    def rotary(self) -> RotarySpec:
        """How its keys are rotated, layer by layer."""
        return self._rotary

    @property
    def window_tokens(self) -> int:
        """Last tokens of a prompt that are computed even where their KV is stored."""
        return self._window_tokens

    def namespace(self, tenant_salt: str = "") -> Namespace:
        """Name of the KV that this engine computes; equal names, equal KV."""
        shape = self._geometry
        return Namespace(
            weights=self._fingerprint,
            dtype=str(self._dtype).removeprefix("torch."),
            geometry=(
                f"layers={shape.num_layers} heads={shape.num_kv_heads} key={shape.key_head_dim} "
                f"value={shape.value_head_dim} rotary={self._rotary.digest()}"
            ),
            tenant_salt=tenant_salt,
        )

    def new_cache(self) -> Cache:
        """Make an empty cache with the right kind of storage for each layer."""
        cache = DynamicCache(config=self._config)
        for index, layer in enumerate(cache.layers):
            if type(layer) is DynamicSlidingWindowLayer:
                cache.layers[index] = KeepingSlidingLayer(sliding_window=layer.sliding_window)
        return cache

    def cached_tokens(self, cache: Cache) -> int:
        """Tokens whose KV ``cache`` holds.

        Raises
        ------
        ValueError
            If this engine did not make the cache, or its layers differ in length.
        """
        kinds = [type(layer) for layer in getattr(cache, "layers", ())]
        if kinds != self._layer_kinds:
            raise ValueError(f"need a cache that this engine made, got {cache!r}")
        lengths = {int(layer.get_seq_length()) for layer in cache.layers}
        if len(lengths) != 1:
            raise ValueError(f"the layers of the cache differ in length: {sorted(lengths)}")
        return lengths.pop()

    def prefill(self, tokens: Sequence[int], cache: Cache = None) -> tuple[Cache, torch.Tensor]:
        """Compute KV of all of ``tokens``, of which ``cache`` may hold the first; see `Engine`."""
        cache = self.new_cache() if cache is None else cache
        new_tokens = self._uncached(tokens, cache)
        with self._undone_on_error(cache):
            return cache, self._run(new_tokens, cache, num_logits=1)[0]

    def capture(self, cache: Cache, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy out the KV of positions ``[start, stop)``; see `Engine`."""
        held = self.cached_tokens(cache)
        first = max(first_position(layer) for layer in cache.layers)
        if not first <= start < stop <= held:
            raise ValueError(f"need {first} <= start < stop <= {held}, got [{start}, {stop})")
        self._rotary.check_length(held)
        return stacked(cache, start, stop)

    def restore(self, keys_TLHD: torch.Tensor, values_TLHD: torch.Tensor) -> Cache:
        """Make a new cache that holds positions ``[0, T)``; the tensors are copied.

        Sliding layers are given only what their window can still read.
        """
        shape = self._geometry
        self._check_kv("keys", keys_TLHD, len(keys_TLHD), shape.key_head_dim)
        self._check_kv("values", values_TLHD, len(keys_TLHD), shape.value_head_dim)
        num_tokens = len(keys_TLHD)
        self._rotary.check_length(num_tokens)
        keys_LHTD, values_LHTD = (
            states.detach().permute(1, 2, 0, 3).to(self._model.device).contiguous()
            for states in (keys_TLHD, values_TLHD)
        )
        cache = self.new_cache()
        for index, layer in enumerate(cache.layers):
            is_sliding = isinstance(layer, KeepingSlidingLayer)
            first = max(0, num_tokens - layer.sliding_window + 1) if is_sliding else 0
            # `update` concatenates, and so copies.
            layer.update(keys_LHTD[index, None, :, first:], values_LHTD[index, None, :, first:])
            if is_sliding:
                # Counts what was ever stored: positions and masks come from it.
                layer.cumulative_length = num_tokens
        return cache

    def crop(self, cache: Cache, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` tokens of ``cache`` only.

        Raises
        ------
        ValueError
            If it holds fewer, or a sliding layer no longer has the window before there.
        """
        held = self.cached_tokens(cache)
        if not 0 <= num_tokens <= held:
            raise ValueError(f"need 0 <= num_tokens <= {held}, got {num_tokens}")
        for index, layer in enumerate(cache.layers):
            window = layer.sliding_window - 1 if layer.is_sliding else 0
            if layer.is_sliding and first_position(layer) > max(0, num_tokens - window):
                raise ValueError(f"layer {index} has forgotten what {num_tokens} tokens need")
        truncate(cache, num_tokens)

    def generate(
        self,
        tokens: Sequence[int],
        cache: Cache,
        max_new_tokens: int,
        *,
        on_token: OnToken | None = None,
    ) -> list[int]:
        """Continue ``tokens`` greedily and return the new ones only; see `Engine`.

        The cache then holds all but the last of them.
        """
        if max_new_tokens < 1:
            raise ValueError(f"need max_new_tokens >= 1, got {max_new_tokens}")
        cache = self.new_cache() if cache is None else cache
        new_tokens = self._uncached(tokens, cache, num_following=max_new_tokens - 1)
        with self._undone_on_error(cache), torch.no_grad():
            if len(new_tokens) > PREFILL_CHUNK_TOKENS:
                self._run(new_tokens[:-1], cache, num_logits=1)
            ids = torch.tensor([list(tokens)], device=self._model.device)
            output = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                streamer=None if on_token is None else _Streamer(on_token),
                **{self._cache_argument: cache},
            )
        generated: list[int] = output[0, len(tokens) :].tolist()
        return generated

    def score(
        self, tokens: Sequence[int], cache: Cache, continuation: Sequence[int]
    ) -> torch.Tensor:
        """Logits that predict each token of ``continuation``; the cache is left as it was."""
        cache = self.new_cache() if cache is None else cache
        new_tokens = self._uncached(tokens, cache, num_following=len(continuation) - 1)
        self._check_tokens(continuation)
        held = self.cached_tokens(cache)
        try:
            # The last token's logits predict nothing that was asked for.
            run = [*new_tokens, *continuation[:-1]]
            return self._run(run, cache, num_logits=len(continuation))
        finally:
            truncate(cache, held)

    def _check_supported(self, takes_positions: bool) -> None:
        """Refuse what cannot be restored exactly, before anything is run."""
        name = self._config.model_type
        if self._dtype not in TOLERANCES:
            raise UnsupportedModelError(name, f"it computes in {self._dtype}")
        if self._model.config.is_encoder_decoder:
            raise UnsupportedModelError(name, "it has an encoder")
        layers = DynamicCache(config=self._config).layers
        if len(layers) != self._config.num_hidden_layers:
            raise UnsupportedModelError(name, "not each of its layers has a cache")
        for index, layer in enumerate(layers):
            if why := refusal(self._config, index, layer):
                raise UnsupportedModelError(f"{name} layer {index}", why)
        if not self._cache_argument or not takes_positions:
            raise UnsupportedModelError(name, "its forward does not take a cache and positions")
        self._layer_kinds = [type(layer) for layer in self.new_cache().layers]

    def _probe(self) -> tuple[KVGeometry, RotarySpec]:
        """Learn from one short run what the layers cache, and how their keys are rotated."""
        name, config = self._config.model_type, self._config
        candidates = rotary_candidates(self._model)
        positions = probe_positions(config.max_position_embeddings, candidates)
        cache = self.new_cache()
        device = self._model.device
        # Not token 0: where that is padding its embedding is zero, and so are its keys.
        ids = torch.full((1, len(positions)), config.vocab_size // 2, device=device)
        with torch.no_grad(), constant_inputs(self._model):
            self._model(
                input_ids=ids,
                position_ids=torch.tensor([positions], device=device),
                use_cache=True,
                **{self._cache_argument: cache},
            )
        geometry = common_geometry(cache, len(positions), name)
        states = stacked(cache, 0, len(positions))
        return geometry, fit_rotary(*states, positions, candidates, name=name)

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        """Refuse ids that the embedding would fail on halfway through a run."""
        if not tokens:
            raise ValueError("need at least one token")
        if not 0 <= min(tokens) <= max(tokens) < self._config.vocab_size:
            raise ValueError(
                f"need 0 <= token < {self._config.vocab_size}, got {min(tokens)}..{max(tokens)}"
            )

    def _uncached(
        self, tokens: Sequence[int], cache: Cache, *, num_following: int = 0
    ) -> list[int]:
        """The tokens after those in ``cache``; there must be one.

        Refused where all, with ``num_following`` more, are too long for the rotation.  A cache
        as long as the prompt would make transformers run the whole prompt again on top of it,
        and give other tokens with no error.
        """
        self._check_tokens(tokens)
        self._rotary.check_length(len(tokens) + num_following)
        held = self.cached_tokens(cache)
        if held >= len(tokens):
            raise ValueError(
                f"need a cache shorter than the sequence of {len(tokens)} tokens, "
                f"got {held}: crop it first"
            )
        return list(tokens[held:])

    def _run(self, new_tokens: Sequence[int], cache: Cache, *, num_logits: int) -> torch.Tensor:
        """Append ``new_tokens`` to ``cache``; the logits at the last ``num_logits`` of them."""
        first_wanted = len(new_tokens) - num_logits
        kept = []
        for start in range(0, len(new_tokens), PREFILL_CHUNK_TOKENS):
            chunk = new_tokens[start : start + PREFILL_CHUNK_TOKENS]
            wanted = max(0, start + len(chunk) - max(start, first_wanted))
            # 0 would mean all of them.
            options = {"logits_to_keep": max(1, wanted)} if self._may_keep_logits else {}
            with torch.no_grad():
                output = self._model(
                    input_ids=torch.tensor([list(chunk)], device=self._model.device),
                    use_cache=True,
                    **{self._cache_argument: cache},
                    **options,
                )
            if wanted:
                kept.append(output.logits[0, -wanted:].to("cpu", torch.float32))
        return torch.cat(kept)

    def _check_kv(self, what: str, states: torch.Tensor, num_tokens: int, head_dim: int) -> None:
        """Refuse tensors of another model, or that were cut."""
        shape = (num_tokens, self._geometry.num_layers, self._geometry.num_kv_heads, head_dim)
        if states.shape != shape or states.dtype != self._dtype:
            raise ValueError(
                f"need {what} {shape} in {self._dtype}, got {tuple(states.shape)} in {states.dtype}"
            )

    @contextmanager
    def _undone_on_error(self, cache: Cache) -> Iterator[None]:
        """Give ``cache`` its length back if the body raises, whatever it raises."""
        held = self.cached_tokens(cache)
        try:
            yield
        except BaseException:
            truncate(cache, held)
            raise


class _Streamer:
    """Passes on what ``generate`` streams, except for the prompt, which comes first."""

    def __init__(self, on_token: OnToken) -> None:
        self._on_token = on_token
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then one token at a time."""
        if not self._is_prompt:
            self._on_token(int(value.item()))
        self._is_prompt = False

    def end(self) -> None:
        """Nothing is left to flush."""


def _greedy(config: GenerationConfig) -> GenerationConfig:
    """Settings that take the likeliest token each time, and end where ``config`` does.

    A model's own may hold penalties that would change which token that is.
    """
    end = config.eos_token_id
    padding = config.pad_token_id
    if padding is None:
        padding = end[0] if isinstance(end, list) else end
    return GenerationConfig(do_sample=False, eos_token_id=end, pad_token_id=padding)
