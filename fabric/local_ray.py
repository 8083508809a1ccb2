"""A Ray on this machine that outlives the command that started it, and how to reach any Ray.

Token authentication is on in every Ray started here: `fabric.__main__` sees to it.  Only what was started here is ever
stopped: the head's process group is remembered in a file in the user's cache directory.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import ray

from codec.errors import ConfigError
from fabric.engines.loading import cache_directory
from fabric.outcome import first_line

START_TIMEOUT_S = 120.0
KNOCK_TIMEOUT_S = 3.0
OBJECT_STORE_BYTES = 1 << 30


def connect(address: str | None) -> None:
    """Join a running Ray as a driver.

    Parameters
    ----------
    address
        Of the cluster; ``None`` for the one that runs on this machine.

    Raises
    ------
    ConfigError
        If there is none; the message says how to start one.
    """
    where = address or _address_on_this_machine()
    if not is_running(address) or where is None:
        raise ConfigError(
            f"no Ray answers at {address or 'this machine'}; "
            "start one with `kvfabric up` or `ray up cluster.yaml`"
        )
    try:
        ray.init(address=where, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError) as error:
        raise ConfigError(
            f"the Ray at {where} refuses this driver ({first_line(error)}); is the file "
            "~/.ray/auth_token the one its head has?"
        ) from error


def is_running(address: str | None) -> bool:
    """Whether anything listens where `connect` would go."""
    where = address or _address_on_this_machine()
    return where is not None and _answers(where)


def _address_on_this_machine() -> str | None:
    """Where Ray itself would look: its variable, then the file its head leaves behind."""
    if "RAY_ADDRESS" in os.environ:
        return os.environ["RAY_ADDRESS"]
    note = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    try:
        return note.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def _answers(address: str) -> bool:
    """Whether anything listens there; Ray would try a dead address for minutes."""
    host, _, port = address.rpartition("://")[2].partition("/")[0].rpartition(":")
    if not host or not port.isdigit():
        return True  # not an address to knock at: let Ray judge it
    try:
        with socket.create_connection((host, int(port)), timeout=KNOCK_TIMEOUT_S):
            return True
    except OSError:
        return False


def start() -> None:
    """Start a Ray head on this machine, detached, and return when it answers.

    Raises
    ------
    ConfigError
        If it does not come up.
    """
    state = _state_file()
    state.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    log = state.with_suffix(".log")
    with log.open("wb") as output:
        head = subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
                *("--include-dashboard=false", "--disable-usage-stats"),
                f"--object-store-memory={OBJECT_STORE_BYTES}",
            ],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    state.write_text(json.dumps({"pid": head.pid}), encoding="utf-8")
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if head.poll() is not None:
            break
        if "Ray runtime started" in log.read_text(encoding="utf-8", errors="replace"):
            return
        time.sleep(0.2)
    raise ConfigError(f"the local Ray did not start; its output is in {log}")


def stop() -> bool:
    """Stop the Ray head that `start` started; whether there was one."""
    state = _state_file()
    if not state.exists():
        return False
    pid = int(json.loads(state.read_text(encoding="utf-8"))["pid"])
    state.unlink()
    if not _is_our_head(pid):
        return False
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + START_TIMEOUT_S
    while _is_our_head(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    return True


def _is_our_head(pid: int) -> bool:
    """Whether that process is (still) a Ray head as started here, and not a reused id."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    is_zombie = status.rpartition(")")[2].split()[:1] == ["Z"]
    return not is_zombie and b"--head" in command and b"--block" in command


def _state_file() -> Path:
    return cache_directory().parent / "local-ray.json"
