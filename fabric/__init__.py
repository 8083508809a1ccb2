"""What users touch: the fabric, its client, the command line, engines.

Names are imported when first used: engines and loading work where Ray is absent, and the
command line can settle Ray's environment before Ray reads it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from codec.errors import FabricError
    from fabric.client import FabricClient
    from fabric.cluster import Fabric
    from fabric.config import FabricConfig, load_config
    from fabric.outcome import RestoreOutcome

__all__ = ["Fabric", "FabricClient", "FabricConfig", "FabricError", "RestoreOutcome", "load_config"]

_HOMES = {
    "Fabric": "fabric.cluster",
    "FabricClient": "fabric.client",
    "FabricConfig": "fabric.config",
    "FabricError": "codec.errors",
    "RestoreOutcome": "fabric.outcome",
    "load_config": "fabric.config",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
