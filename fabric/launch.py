"""Start and stop the fabric's actors on the current Ray cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.naming import ROUTER, is_fabric_actor, worker_actor_name
from actors.router_actor import RouterActor
from actors.worker_actor import WorkerActor, WorkerOptions
from fabric.config import FabricConfig

Placing = Mapping[str, Mapping[str, Any]]
"""``{worker: Ray actor options that place it}``."""

#: Workers restart for ever; what changes state is never run twice by Ray.
_ACTOR_OPTIONS: dict[str, Any] = {
    "lifetime": "detached",
    "num_cpus": 0,
    "max_restarts": -1,
    "max_task_retries": 0,
    "max_pending_calls": 10_000,
}


def place_on_cluster() -> Placing:
    """One worker per GPU of every live node, or one per node where there is none.

    Names are ``<host>.gpu<k>``; hosts that share a name are told apart by a number.
    """
    placing: dict[str, Mapping[str, Any]] = {}
    seen: dict[str, int] = {}
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    for node in sorted(nodes, key=lambda node: (node["NodeManagerHostname"], node["NodeID"])):
        if not node["Alive"]:
            continue
        host = node["NodeManagerHostname"]
        seen[host] = seen.get(host, 0) + 1
        name = host if seen[host] == 1 else f"{host}-{seen[host]}"
        num_gpus = int(node["Resources"].get("GPU", 0))
        pinned = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        for gpu in range(max(1, num_gpus)):
            placing[f"{name}.gpu{gpu}"] = {
                "scheduling_strategy": pinned,
                "num_gpus": 1 if num_gpus else 0,
            }
    return placing


def start_actors(
    config: FabricConfig, nodes: Placing | Sequence[str], environment: Mapping[str, str]
) -> None:
    """Start the router and a worker per name; those that run already are kept.

    Returns when every worker serves and has joined the router.  If one does not come up, what
    was started here is ended again.
    """
    placing = nodes if isinstance(nodes, Mapping) else {node: {} for node in nodes}
    before = set(_actor_names(config))
    with contextlib.ExitStack() as undo:
        undo.callback(lambda: _end([n for n in _actor_names(config) if n not in before], config))
        _start(config, placing, dict(environment))
        undo.pop_all()


def stop_actors(config: FabricConfig) -> int:
    """End every actor of the fabric on the current Ray; how many there were."""
    names = _actor_names(config)
    _end(names, config)
    return len(names)


def num_fabrics() -> int:
    """Fabrics that run on the current Ray, by their routers."""
    entries = ray.util.list_named_actors(all_namespaces=True)
    return sum(entry["name"] == ROUTER for entry in entries)


def _start(config: FabricConfig, placing: Placing, environment: dict[str, str]) -> None:
    common = _ACTOR_OPTIONS | {"namespace": config.ray_namespace, "get_if_exists": True}
    runtime_env = {"env_vars": environment}
    router: Any = RouterActor.options(**common, name=ROUTER).remote(
        tokens_per_chunk=config.tokens_per_chunk,
        lost_after_s=config.lost_after_s,
        expected_nodes=tuple(placing),
    )
    ray.get(router.ping.remote(), timeout=4 * config.deadline_s)
    workers: list[Any] = [
        WorkerActor.options(
            **{**common, "runtime_env": runtime_env, **options}, name=worker_actor_name(node)
        ).remote(_worker_options(config, node))
        for node, options in placing.items()
    ]
    ray.get([worker.start.remote() for worker in workers], timeout=4 * config.deadline_s)


def _actor_names(config: FabricConfig) -> list[str]:
    """Of the fabric's actors that run on the current Ray."""
    return [
        entry["name"]
        for entry in ray.util.list_named_actors(all_namespaces=True)
        if entry["namespace"] == config.ray_namespace and is_fabric_actor(entry["name"])
    ]


def _end(names: Sequence[str], config: FabricConfig) -> None:
    for name in sorted(names, reverse=True):  # workers first: they talk to the router
        with contextlib.suppress(ValueError):
            actor = ray.get_actor(name, namespace=config.ray_namespace)
            if name != ROUTER:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.get(actor.stop.remote(), timeout=config.deadline_s)
            ray.kill(actor, no_restart=True)


def _worker_options(config: FabricConfig, node: str) -> WorkerOptions:
    return WorkerOptions(
        node=node,
        arena_bytes=config.arena_bytes,
        extent_bytes=config.extent_bytes,
        memory_price_us_per_gib_s=config.memory_price_us_per_gib_s,
        heartbeat_s=config.heartbeat_s,
        deadline_s=config.deadline_s,
        router_name=ROUTER,
        ray_namespace=config.ray_namespace,
    )
