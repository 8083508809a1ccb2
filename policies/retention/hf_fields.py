"""Read single fields of a model's config, refusing with the field's name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from codec.errors import RetentionError
from policies.retention.hf_tables import LEGACY_TYPES, Family
from policies.retention.ir import INT_MAX
from policies.retention.program import MAX_COUNT


@dataclass(frozen=True, slots=True)
class Fields:
    """A config with the defaults of its family."""

    config: Mapping[str, object]
    family: Family

    def get(self, name: str) -> object:
        """Value of a field; its default, or nothing, if it is absent."""
        return self.config.get(name, self.family.defaults.get(name))

    def refuse(self, name: str, why: str, rule: str = "bad-field") -> RetentionError:
        """The error for a field, to be raised."""
        return RetentionError(rule, f"{name}={self.get(name)!r}", why)

    def count(self, name: str, *, rule: str = "bad-field", default: int | None = None) -> int:
        """A field that must be a positive integer."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value <= MAX_COUNT:
            raise self.refuse(name, "need a positive integer", rule)
        return value

    def flag(self, name: str) -> bool:
        """A field that must be true or false; false if absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(name, "need true or false")
        return bool(value)

    def window(self, name: str = "sliding_window") -> int | None:
        """A window's length; nothing if it is unset."""
        value = self.get(name)
        if value is None:
            return None
        if type(value) is not int or not 1 <= value <= INT_MAX:
            raise self.refuse(name, f"need null or an integer in 1..{INT_MAX}", "window-range")
        return value

    def need_window(self, name: str = "sliding_window") -> int:
        """A window's length, where layers need one."""
        found = self.window(name)
        if found is None:
            raise self.refuse(name, "some layers need it", "no-window")
        return found

    def listed_types(self, num_layers: int, name: str = "layer_types") -> tuple[str, ...] | None:
        """Layer types that the config lists itself; nothing if it does not."""
        value = self.config.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != num_layers:
            raise self.refuse(name, f"need a list of {num_layers}", "bad-layers")
        found = []
        for index, entry in enumerate(value):
            kind = LEGACY_TYPES.get(entry, entry) if isinstance(entry, str) else None
            if kind is None or kind not in self.family.allowed:
                allowed = ", ".join(sorted(self.family.allowed))
                why = f"this model type has only {allowed}"
                raise RetentionError("unknown-layer-type", f"{name}[{index}]={entry!r}", why)
            found.append(kind)
        return tuple(found)
