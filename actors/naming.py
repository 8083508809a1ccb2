"""Names of the fabric's actors within its Ray namespace."""

from __future__ import annotations

ROUTER = "router"
_WORKER_PREFIX = "worker:"


def worker_actor_name(node: str) -> str:
    """Actor name of the worker called ``node``, which names a node and a GPU of it."""
    return f"{_WORKER_PREFIX}{node}"


def is_fabric_actor(name: str) -> bool:
    """Whether an actor of that name is the router or a worker."""
    return name == ROUTER or name.startswith(_WORKER_PREFIX)
