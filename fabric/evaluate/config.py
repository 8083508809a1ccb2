"""How much of the evaluation set is run, and how each sample is coded and scored."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Final

from codec.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """The protocol; part of the evaluation set's digest."""

    context_tokens: int = 1024
    """Tokens before those that are scored; their cache is what an arm codes."""

    continuation_tokens: int = 128
    """Tokens scored after each context."""

    exact_first: int = 4
    """Rows that no arm codes: attention sinks."""

    exact_last: int = 128
    """Rows that no arm codes: the window that the fabric computes anew."""

    windows: int = 8
    """Samples of each set, or as many as its text gives."""

    lookups: int = 24
    lookup_pairs: int = 60
    """Keys with values in each prompt."""

    greedy_windows: int = 2
    """Of each set of natural text, continued greedily too."""

    greedy_tokens: int = 32
    seed: int = 0
    """Of everything generated."""

    def __post_init__(self) -> None:
        least = {"lookup_pairs": 4, "lookups": 0, "greedy_windows": 0, "seed": 0}
        least |= {"exact_first": 0}
        for field in fields(self):
            if getattr(self, field.name) < least.get(field.name, 1):
                raise ConfigError(
                    f"{field.name} must be at least {least.get(field.name, 1)}, "
                    f"got {getattr(self, field.name)}"
                )
        if self.context_tokens <= self.num_exact:
            raise ConfigError(
                f"context_tokens must be over {self.num_exact}, which are not coded, "
                f"got {self.context_tokens}"
            )

    @property
    def num_exact(self) -> int:
        """Tokens of every context that no arm codes."""
        return self.exact_first + self.exact_last

    @property
    def sample_tokens(self) -> int:
        """Context and continuation."""
        return self.context_tokens + self.continuation_tokens

    def text(self) -> str:
        """Every setting, for digests."""
        return " ".join(f"{name}={value}" for name, value in sorted(asdict(self).items()))


FULL: Final = EvaluationConfig()
QUICK: Final = EvaluationConfig(
    context_tokens=320,
    continuation_tokens=96,
    windows=2,
    lookups=8,
    lookup_pairs=36,
    greedy_windows=1,
    greedy_tokens=16,
)
"""Under a minute for a model of 135 million weights on two cores, one arm."""
