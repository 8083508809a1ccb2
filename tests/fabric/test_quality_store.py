"""Receipts on disk: found under the codecs' names, whole or not at all, trusted for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from codec.errors import CodecError, CorruptBlobError, IdentityMismatchError
from codec.identity import CodecId
from fabric.engines.loading import cache_directory
from fabric.quality_store import find_receipt, receipt_path, save_receipt
from tests.codec.quality_samples import a_receipt

A, B, C = (CodecId(bytes([n]) * 16) for n in (0x0A, 0x0B, 0x0C))


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_receipt_lies_beside_the_calibrations_under_its_codecs_name(store: Path) -> None:
    """By its own name where there is one stage."""
    one = receipt_path([A])

    assert one == store / "kvfabric" / "receipts" / f"{A.hex()}.json"
    assert one.parent.parent == cache_directory().parent
    paths = [one, receipt_path([B]), receipt_path([A, B]), receipt_path([B, A])]
    assert len(set(paths)) == 4


def test_what_was_saved_is_found_by_exactly_its_codecs(store: Path) -> None:
    """And nothing else lies there afterwards."""
    path = save_receipt(a_receipt())

    assert find_receipt([A, B]) == a_receipt()
    assert find_receipt([A]) is None
    assert find_receipt([B, A]) is None
    assert list(path.parent.iterdir()) == [path]


def test_a_later_receipt_takes_the_place_of_an_earlier_one() -> None:
    """The newest measurement counts."""
    save_receipt(a_receipt())
    save_receipt(a_receipt(net_ratio=7.5))

    found = find_receipt([A, B])

    assert found is not None
    assert found.net_ratio == 7.5


def test_a_tampered_file_is_refused() -> None:
    """One figure made better by hand."""
    path = save_receipt(a_receipt())
    path.write_text(path.read_text().replace("8.25", "9.25"))

    with pytest.raises(CorruptBlobError, match="digest"):
        find_receipt([A, B])


def test_a_receipt_under_another_codecs_name_is_refused() -> None:
    """A copied file qualifies nothing."""
    path = save_receipt(a_receipt())
    path.rename(receipt_path([A, C]))

    with pytest.raises(IdentityMismatchError, match="codec"):
        find_receipt([A, C])


@pytest.mark.parametrize("content", [b"", b"{}", b"\x00" * 100, b" " * (1 << 20) + b"{}"])
def test_a_file_that_is_no_receipt_is_refused(content: bytes) -> None:
    """However long."""
    path = save_receipt(a_receipt())
    path.write_bytes(content)

    with pytest.raises(CodecError):
        find_receipt([A, B])


def test_a_folder_in_a_receipts_place_is_a_typed_error() -> None:
    """As anything that cannot be read."""
    receipt_path([A]).mkdir(parents=True)

    with pytest.raises(CorruptBlobError):
        find_receipt([A])
