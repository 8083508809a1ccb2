"""The file of a calibration: it comes back whole, or is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from codec.calibration_file import FORMAT, CalibrationFile, read_file
from codec.errors import CorruptBlobError

FIELDS = {"profile": "some", "number": 1.5, "list": [1, 2]}


def tensors() -> dict[str, torch.Tensor]:
    """One of each type that calibrations have, and one without elements."""
    return {
        "a.float": torch.linspace(-1, 1, 12).view(3, 4),
        "a.half": torch.ones(5, dtype=torch.float16),
        "b.int": torch.arange(6, dtype=torch.int32),
        "b.none": torch.zeros(0, 4),
    }


def content() -> CalibrationFile:
    """A file's content."""
    return CalibrationFile.of(FIELDS, tensors())


def test_a_file_comes_back(tmp_path: Path) -> None:
    """Fields, tensors with their types, and the digest; no other file is left behind."""
    path = tmp_path / "deep" / "c.safetensors"

    content().save(path)
    again = read_file(path)

    assert again.fields == {"format": FORMAT, **FIELDS}
    assert again.digest == content().digest
    assert again.nbytes == content().nbytes == 48 + 10 + 24
    for name, tensor in tensors().items():
        assert again.tensors[name].dtype == tensor.dtype
        assert torch.equal(again.tensors[name], tensor)
    assert list(path.parent.iterdir()) == [path]


def test_the_digest_does_not_depend_on_order() -> None:
    """Neither of the fields nor of the tensors."""
    turned = CalibrationFile.of(dict(reversed(FIELDS.items())), dict(reversed(tensors().items())))

    assert turned.digest == content().digest


def test_the_digest_follows_every_field_and_every_byte() -> None:
    """Name, type, shape and each single byte of each tensor, and each field."""
    fields = [FIELDS, *({**FIELDS, name: 7} for name in FIELDS)]
    digests = [CalibrationFile.of(made, tensors()).digest for made in fields]
    for name, tensor in tensors().items():
        for at in range(tensor.nbytes):
            changed = tensor.clone()
            changed.view(torch.uint8).view(-1)[at] ^= 1
            digests.append(CalibrationFile.of(FIELDS, {**tensors(), name: changed}).digest)
        moved = tensors()
        moved["c" + name] = moved.pop(name)
        digests.append(CalibrationFile.of(FIELDS, moved).digest)
    reshaped = {**tensors(), "a.float": tensors()["a.float"].view(4, 3)}
    retyped = {**tensors(), "b.int": tensors()["b.int"].view(torch.float32)}
    digests += [CalibrationFile.of(FIELDS, made).digest for made in (reshaped, retyped)]

    assert len(set(digests)) == len(digests) == 1 + 3 + 82 + 4 + 2


def test_any_changed_byte_of_the_file_is_refused(tmp_path: Path) -> None:
    """In the metadata, the table or a tensor."""
    data = content().to_bytes()
    path = tmp_path / "c.safetensors"
    for at in range(0, len(data), 3):
        spoiled = bytearray(data)
        spoiled[at] ^= 0x10
        path.write_bytes(spoiled)

        with pytest.raises(CorruptBlobError, match=r"calibration c\.safetensors"):
            read_file(path)


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 40, -1, -40])
def test_a_cut_file_is_refused(cut: int, tmp_path: Path) -> None:
    """Wherever it ends."""
    path = tmp_path / "c.safetensors"
    path.write_bytes(content().to_bytes()[:cut])

    with pytest.raises(CorruptBlobError, match="cannot be read"):
        read_file(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """By the same error, which names it."""
    with pytest.raises(CorruptBlobError, match=r"calibration absent: cannot be read|absent"):
        read_file(tmp_path / "absent")


@pytest.mark.parametrize("metadata", [None, {}, {"digest": "00"}, {"calibration": "{}"}])
def test_another_kind_of_file_is_refused(metadata: dict[str, str] | None, tmp_path: Path) -> None:
    """Sound safetensors, but none of ours."""
    path = tmp_path / "c.safetensors"
    save_file(tensors(), path, metadata=metadata)

    with pytest.raises(CorruptBlobError, match="calibration"):
        read_file(path)


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": "kvfabric.calibration.0"}', "3"])
def test_fields_of_another_format_are_refused(text: str) -> None:
    """Older and newer files fail closed."""
    with pytest.raises(ValueError, match=f"need {FORMAT}"):
        _ = CalibrationFile(metadata=text, tensors={}).fields


def test_metadata_is_canonical_json() -> None:
    """Equal fields give equal text."""
    text = content().metadata

    assert json.loads(text) == {"format": FORMAT, **FIELDS}
    assert " " not in text
    assert text.index('"format"') < text.index('"list"') < text.index('"number"')


def test_saving_over_a_file_replaces_it(tmp_path: Path) -> None:
    """Whole or not at all."""
    path = tmp_path / "c.safetensors"
    content().save(path)
    CalibrationFile.of({"profile": "other"}, {}).save(path)

    assert read_file(path).fields["profile"] == "other"
