"""What users touch: the fabric, its client, the command line, engines."""

from codec.errors import FabricError
from fabric.client import FabricClient
from fabric.cluster import Fabric, RestoreOutcome
from fabric.config import FabricConfig, load_config

__all__ = ["Fabric", "FabricClient", "FabricConfig", "FabricError", "RestoreOutcome", "load_config"]
