"""Run the corpus through the model once, for all stages and all targets.

1. Some windows are run with gradients (`fabric.engines.sensitivity`).
2. All windows are prefilled; every `holdout_every`-th is held out, the others go into
   the moments.
3. Every few windows all that is known is written down, and a later run goes on from there to
   the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from codec.errors import ConfigError
from codec.geometry import Stage
from codec.identity import digest
from fabric.calibrate.corpus import (
    Corpus,
    GradientWindow,
    Window,
    cut_windows,
    gradient_windows,
    prefix_of,
)
from fabric.calibrate.domains import Domain, DomainTable
from fabric.calibrate.partial import load_partial, save_partial
from fabric.calibrate.progress import Progress
from fabric.calibrate.rows import GradientRows, StageRows
from fabric.engines.loading import LoadedModel
from fabric.engines.protocol import Engine
from fabric.engines.sensitivity import cache_gradients

MAX_HELD_OUT_ROWS: Final = 6144
SAVE_WINDOWS = 16
"""Windows between two writings of what is known."""
SAVE_GRADIENT_WINDOWS = 4
NEAR_SHARE: Final = 8
"""The last eighth of a context is too near to what follows to stand for other tokens."""
DRAW_SEED: Final = 20260101


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureConfig:
    """What a capture depends on, beside model and corpus; profiles with equal ones share it."""

    stages: tuple[Stage, ...]
    sink_tokens: int
    holdout_every: int
    with_gradients: bool

    def key(self, namespace: str, corpus: Corpus) -> str:
        """Names the capture: equal keys, equal bits."""
        sizes = corpus.config.whole() if self.with_gradients else corpus.config.plain()
        inputs = {
            "namespace": namespace,
            "corpus": corpus.digest,
            "stages": " ".join(map(str, self.stages)),
            "sink_tokens": self.sink_tokens,
            "holdout_every": self.holdout_every,
            "with_gradients": self.with_gradients,
            **sizes,
        }
        parts = [f"{name}={value}".encode() for name, value in sorted(inputs.items())]
        return digest("kvfabric.capture.1", *parts).hex()


class Capture:
    """Runs the corpus through a model and keeps what fits need.

    Invariant: `_gradients` holds windows only until `StageRows.measure` has seen them all.
    """

    def __init__(
        self, engine: Engine[Any], loaded: LoadedModel, corpus: Corpus, config: CaptureConfig
    ) -> None:
        """Tokenize and cut the corpus; nothing is run yet.

        Raises
        ------
        ConfigError
            If there is too little text.
        """
        if corpus.config.window_tokens <= config.sink_tokens:
            raise ConfigError(
                f"need window_tokens over the {config.sink_tokens} sink tokens, "
                f"got {corpus.config.window_tokens}"
            )
        sources, prefix = corpus.tokenized(loaded), prefix_of(loaded)
        self._engine, self._model, self._config = engine, loaded.model, config
        self._windows: Sequence[Window] = cut_windows(sources, corpus.config, prefix)
        self._gradient_windows: Sequence[GradientWindow] = (
            gradient_windows(sources, corpus.config, prefix) if config.with_gradients else []
        )
        self.key = config.key(engine.namespace().digest().hex(), corpus)
        self.stages = tuple(
            StageRows(
                stage=stage,
                geometry=engine.geometry.of_stage(stage),
                rotary=engine.rotary.of_layers(range(stage.layer_start, stage.layer_stop)),
            )
            for stage in config.stages
        )
        self._domains = DomainTable(corpus.names, corpus.config.window_tokens)
        self._gradients: list[GradientRows] = []
        self._num_gradient_windows = 0
        self._num_windows = 0
        num_held_out = sum(map(self._is_held_out, range(len(self._windows))))
        num_rows = num_held_out * (corpus.config.window_tokens - config.sink_tokens)
        self._stride = max(1, -(-num_rows // MAX_HELD_OUT_ROWS))

    @property
    def domains(self) -> tuple[Domain, ...]:
        """What was run of each file."""
        return self._domains.result()

    def run(self, partial: Path, on_progress: Progress) -> None:
        """Run what has not been run, from where ``partial`` says that an earlier run stopped."""
        if (state := load_partial(partial, self.key)) is not None:
            self.restore(state)
        self._run_gradients(partial, on_progress)
        for number in range(self._num_windows, len(self._windows)):
            on_progress("capture", number / len(self._windows))
            self._add_window(number)
            if self._num_windows % SAVE_WINDOWS == 0 or self._num_windows == len(self._windows):
                save_partial(partial, self.key, self.state())
        on_progress("capture", 1.0)

    def state(self) -> dict[str, Tensor]:
        """Everything known so far; see `restore`."""
        state = {"done": torch.tensor([self._num_gradient_windows, self._num_windows])}
        for number, window in enumerate(self._gradients):
            state |= {f"gradients.{number}.{part}": rows for part, rows in enumerate(window)}
        state |= {f"domains.{name}": part for name, part in self._domains.state().items()}
        for number, stage in enumerate(self.stages):
            state |= {f"stage.{number}.{name}": part for name, part in stage.state().items()}
        return state

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        self._num_gradient_windows, self._num_windows = state["done"].tolist()
        while f"gradients.{len(self._gradients)}.0" in state:
            keys, key_part, value_part = (
                state[f"gradients.{len(self._gradients)}.{part}"] for part in range(3)
            )
            self._gradients.append((keys, key_part, value_part))
        self._domains.restore(_within(state, "domains."))
        for number, stage in enumerate(self.stages):
            stage.restore(_within(state, f"stage.{number}."))

    def _run_gradients(self, partial: Path, on_progress: Progress) -> None:
        windows = self._gradient_windows
        if not windows or self.stages[0].sensitivity is not None:
            return
        for number in range(self._num_gradient_windows, len(windows)):
            on_progress("sensitivity", number / len(windows))
            self._add_gradients(number, windows[number])
            if self._num_gradient_windows % SAVE_GRADIENT_WINDOWS == 0:
                save_partial(partial, self.key, self.state())
        for stage in self.stages:
            stage.measure(self._gradients)
        self._gradients = []
        save_partial(partial, self.key, self.state())
        on_progress("sensitivity", 1.0)

    def _add_gradients(self, number: int, window: GradientWindow) -> None:
        # A seed of its own for each window: a run that was interrupted draws the same.
        found = cache_gradients(
            self._engine,
            self._model,
            window.tokens,
            num_context=window.num_context,
            generator=torch.Generator().manual_seed(DRAW_SEED + number),
        )
        stop = window.num_context - window.num_context // NEAR_SHARE
        inner = slice(min(self._config.sink_tokens, stop - 1), stop)
        keys, key_part, value_part = (
            part[inner].bfloat16()
            for part in (found.keys_TLHD, found.key_gradients_TLHD, found.value_gradients_TLHD)
        )
        self._gradients.append((keys, key_part, value_part))
        self._domains.add_gradients(window.domain, len(keys))
        self._num_gradient_windows += 1

    def _add_window(self, number: int) -> None:
        window, sinks = self._windows[number], self._config.sink_tokens
        cache, _ = self._engine.prefill(window.tokens)
        keys, values = self._engine.capture(cache, 0, len(window.tokens))
        keys = self._engine.rotary.unrotate(keys, torch.arange(len(keys)))
        values = values.float()
        is_held_out = self._is_held_out(number)
        energies = torch.zeros(2, len(keys))
        for stage in self.stages:
            rows = stage.share(keys), stage.share(values)
            if is_held_out:
                chosen = self._chosen(number, len(keys) - sinks)
                stage.hold_out(rows[0][sinks:][chosen], rows[1][sinks:][chosen])
            else:
                stage.add(rows[0][sinks:], rows[1][sinks:])
            energies += stage.energies(*rows)
        self._domains.add_window(window.domain, energies, is_held_out=is_held_out)
        self._num_windows += 1

    def _is_held_out(self, number: int) -> bool:
        return number % self._config.holdout_every == 1

    def _chosen(self, number: int, num_rows: int) -> Tensor:
        """Rows to keep of a held-out window: every so many, counted across windows."""
        before = sum(map(self._is_held_out, range(number))) * num_rows
        return torch.arange(-before % self._stride, num_rows, self._stride)


def _within(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): part for name, part in state.items() if name.startswith(prefix)
    }
