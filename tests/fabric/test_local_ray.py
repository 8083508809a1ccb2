"""Finding a Ray: where Ray itself would look, and no minutes of waiting for a dead one."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from codec.errors import ConfigError
from fabric import local_ray


@pytest.fixture
def somewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty temporary folder of Ray's, and no address in the environment."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray" / "ray_current_cluster"


def closed_port() -> int:
    """A port on loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_no_note_is_no_ray(somewhere: Path) -> None:
    """The error says how to start one."""
    assert not somewhere.exists()

    with pytest.raises(ConfigError, match="kvfabric up"):
        local_ray.connect(None)


def test_a_note_that_a_dead_head_left_is_no_ray(somewhere: Path) -> None:
    """Ray itself would try it for minutes."""
    somewhere.write_text(f"127.0.0.1:{closed_port()}")

    with pytest.raises(ConfigError, match="this machine"):
        local_ray.connect(None)


def test_a_named_address_that_is_dead_is_named(somewhere: Path) -> None:
    """Not mistaken for this machine's."""
    address = f"127.0.0.1:{closed_port()}"

    with pytest.raises(ConfigError, match=address):
        local_ray.connect(address)


def test_the_variable_comes_before_the_note(
    somewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for Ray."""
    somewhere.write_text("127.0.0.1:1")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:2")

    assert local_ray._address_on_this_machine() == "127.0.0.1:2"


def test_a_listening_port_answers() -> None:
    """With and without a scheme; what is no address is left to Ray."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert local_ray._answers(f"127.0.0.1:{port}")
        assert local_ray._answers(f"ray://127.0.0.1:{port}/")
    assert local_ray._answers("auto")
    assert not local_ray._answers(f"127.0.0.1:{closed_port()}")
