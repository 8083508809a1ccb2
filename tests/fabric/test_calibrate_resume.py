"""An interrupted calibration goes on from where it stopped, to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fabric.calibrate import AnyConfig, capture
from fabric.calibrate.partial import load_partial, save_partial
from fabric.calibrate.run import calibrate_all
from tests.fabric.calibrate_samples import CORPUS, ENTROPY, PAPER, kept_files, tiny_pair, two_files


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache directory of its own; states are written often."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(capture, "SAVE_WINDOWS", 3)
    monkeypatch.setattr(capture, "SAVE_GRADIENT_WINDOWS", 2)
    return tmp_path / "cache"


class Run:
    """Calibrates in a cache directory and notes what was done; may be interrupted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        """Two files, and a cache directory for each `digests`."""
        self.monkeypatch = monkeypatch
        self.folder = folder
        self.corpus = two_files(folder)
        self.engine, self.loaded = tiny_pair("gemma3")
        self.seen: list[tuple[str, float]] = []

    def digests(
        self, where: str, *, stop_at: int | None = None, configs: tuple[AnyConfig, ...] = (ENTROPY,)
    ) -> list[str]:
        """Digests of both stages' results, in the cache directory ``where``."""
        self.monkeypatch.setenv("XDG_CACHE_HOME", str(self.folder / where))
        self.seen = []

        def on_progress(what: str, fraction: float) -> None:
            self.seen.append((what, fraction))
            if len(self.seen) - 1 == stop_at:
                raise KeyboardInterrupt

        found = calibrate_all(
            self.engine,
            self.loaded,
            configs=configs,
            corpus=self.corpus,
            corpus_config=CORPUS,
            num_stages=2,
            on_progress=on_progress,
        )
        return [part.digest.hex() for parts in found for part in parts]

    def count(self, what: str) -> int:
        """Windows of a kind that were begun in the last run."""
        return sum(name == what and fraction < 1 for name, fraction in self.seen)


def test_interrupted_anywhere_the_result_is_the_same(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """During gradients, during capture and during the fit; nothing is left behind."""
    run = Run(monkeypatch, tmp_path)
    configs = (ENTROPY, PAPER)
    whole = run.digests("whole", configs=configs)
    steps = list(run.seen)
    capture_starts = next(i for i, (what, _) in enumerate(steps) if what == "capture")
    fit_starts = next(i for i, (what, _) in enumerate(steps) if what == "fit")
    assert len(kept_files(tmp_path / "whole")) == 4

    for stop_at in (3, capture_starts + 7, fit_starts + 9):
        where = f"stop{stop_at}"
        with pytest.raises(KeyboardInterrupt):
            run.digests(where, stop_at=stop_at, configs=configs)
        assert run.digests(where, configs=configs) == whole
        assert [path.suffix for path in kept_files(tmp_path / where)] == [".safetensors"] * 4


def test_a_resumed_run_does_not_repeat_what_was_written(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of 5 windows with gradients and 12 others."""
    run = Run(monkeypatch, tmp_path)
    run.digests("whole")
    assert (run.count("sensitivity"), run.count("capture")) == (5, 12)
    capture_starts = [what for what, _ in run.seen].index("capture")

    # Interrupted when the fifth began: four were written.
    with pytest.raises(KeyboardInterrupt):
        run.digests("early", stop_at=4)
    run.digests("early")
    assert (run.count("sensitivity"), run.count("capture")) == (1, 12)

    # When the ninth began: six were written, as were all gradients.
    with pytest.raises(KeyboardInterrupt):
        run.digests("late", stop_at=capture_starts + 8)
    run.digests("late")
    assert (run.count("sensitivity"), run.count("capture")) == (0, 6)


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "foreign"])
def test_a_state_that_is_not_ours_counts_as_absent(
    damage: str, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Everything is run again, and the result is the same."""
    run = Run(monkeypatch, tmp_path)
    whole = run.digests("whole")
    capture_starts = [what for what, _ in run.seen].index("capture")
    with pytest.raises(KeyboardInterrupt):
        run.digests("bad", stop_at=capture_starts + 8)
    (path,) = kept_files(tmp_path / "bad")
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "foreign":
        save_partial(path, "another capture", {"done": torch.tensor([5, 12])})
    else:
        path.write_bytes(data[: len(data) // 2 if damage == "cut" else 0])

    assert run.digests("bad") == whole
    assert (run.count("sensitivity"), run.count("capture")) == (5, 12)


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    """Every type and shape, only under its key."""
    path = tmp_path / "deep" / "x.partial"
    tensors = {
        "count": torch.tensor([3, 4]),
        "sum": torch.randn(2, 3, dtype=torch.float64),
        "rows": torch.randn(4, 2).bfloat16(),
        "part": torch.randn(6, 4)[:, 1:3],
        "none": torch.zeros(0, 5),
    }

    save_partial(path, "key", tensors)
    found = load_partial(path, "key")

    assert found is not None
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert load_partial(path, "other key") is None
    assert load_partial(tmp_path / "absent", "key") is None
    assert list(path.parent.iterdir()) == [path]


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    """In the digest, the table and the tensors."""
    path = tmp_path / "x.partial"
    save_partial(path, "key", {"a": torch.arange(3)})
    data = path.read_bytes()

    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :])
        assert load_partial(path, "key") is None


def test_a_disk_that_is_full_costs_a_warning_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And leaves nothing half written; the state before stays."""
    path = tmp_path / "x.partial"
    save_partial(path, "key", {"a": torch.arange(3)})
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk is full")))

    save_partial(path, "key", {"a": torch.arange(4)})

    assert "disk is full" in caplog.text
    assert list(tmp_path.iterdir()) == [path]
    found = load_partial(path, "key")
    assert found is not None
    assert len(found["a"]) == 3
