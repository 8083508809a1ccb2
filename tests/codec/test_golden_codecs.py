"""Golden blobs of each profile: what was written is read by every later build.

Each has its calibration beside it, so that nothing depends on how one is fitted.  Tensors
are compared with a tolerance, as products add up in an order of the library's choosing.
After a deliberate change of the format the files are written anew by `write_golden`:
``python -c "from tests.codec.test_golden_codecs import write_golden; write_golden()"``.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from codec.basis import Moments
from codec.blob import read_blob
from codec.calibration import Calibration
from codec.entropy.rans import decode_symbols, encode_symbols
from codec.entropy_calibration import EntropyCalibration, EntropyConfig
from codec.entropy_codec import EntropyCodec
from codec.entropy_fit import EntropyFitter
from codec.importance import Importance
from codec.kvtc import KvtcCodec
from codec.raw import RawCodec
from codec.sensitivity import Metric, Sensitivity
from tests.codec import synthetic

GOLDEN = Path(__file__).parents[1] / "golden"
DTYPES = {"raw": "bfloat16", "paper": "float32", "entropy": "float16"}
NUM_TOKENS = 35


def codec_of(profile: str) -> Any:
    """The codec of a profile, with the golden calibration."""
    path = GOLDEN / f"calibration_{profile}.safetensors"
    if profile == "paper":
        return KvtcCodec(Calibration.load(path))
    if profile == "entropy":
        return EntropyCodec(EntropyCalibration.load(path))
    return RawCodec(synthetic.GEOMETRY.whole, synthetic.GEOMETRY, DTYPES["raw"])


def golden_cache(profile: str) -> tuple[Tensor, Tensor]:
    """What the golden blob was made of: four sinks, and a row of keys that is an outlier."""
    keys, values = synthetic.cache(NUM_TOKENS, seed=40, dtype=DTYPES[profile])
    keys[9] += 50
    return keys, values


def fitted() -> EntropyCalibration:
    """A small calibration of the entropy profile."""
    shape = synthetic.GEOMETRY
    moments = Moments(shape.key_width), Moments(shape.value_width)
    held_out: list[list[Tensor]] = [[], []]
    for seed in range(8):
        keys, values = synthetic.cache(48, seed=seed)
        rows = synthetic.ROTARY.unrotate(keys, torch.arange(48)).flatten(1), values.flatten(1)
        for part, kept, found in zip(moments, held_out, rows, strict=True):
            kept.append(found) if seed % 2 else part.add(found)
    plain = [Metric.plain(6, dim) for dim in (8, 6)]
    keys = torch.cat(held_out[0])
    importance = (keys @ torch.linspace(-0.05, 0.05, shape.key_width)).exp()
    measured = Sensitivity(
        key_metric=plain[0],
        value_metric=plain[1],
        keys_NW=keys.bfloat16(),
        importance_N=importance,
    )
    fitter = EntropyFitter(
        shape.whole,
        shape,
        synthetic.ROTARY,
        moments=moments,
        held_out=(keys, torch.cat(held_out[1])),
        sensitivity=measured,
    )
    return fitter.fit(EntropyConfig(target=6.0), {"model": "golden"})


def write_golden() -> None:
    """Write the golden files; look at the differences before a commit."""
    synthetic.calibrated().save(GOLDEN / "calibration_paper.safetensors")
    fitted().save(GOLDEN / "calibration_entropy.safetensors")
    stated = {}
    for profile, dtype in DTYPES.items():
        codec = codec_of(profile)
        described = synthetic.header(codec.codec_id, NUM_TOKENS, dtype=dtype)
        blob = codec.encode(*golden_cache(profile), header=described)
        (GOLDEN / f"codec_{profile}.bin").write_bytes(blob)
        keys, values = codec.decode(blob)
        np.savez_compressed(
            GOLDEN / f"codec_{profile}.npz",
            keys=keys.float().numpy(),
            values=values.float().numpy(),
        )
        stated[profile] = {
            "codec_id": codec.codec_id.hex(),
            "sections": {name: len(part.data) for name, part in read_blob(blob).sections.items()},
            "sha256": hashlib.sha256(blob).hexdigest(),
        }
    (GOLDEN / "codecs.json").write_text(json.dumps(stated, indent=1) + "\n")


def golden_blob(profile: str) -> bytes:
    """The blob as it was written."""
    return (GOLDEN / f"codec_{profile}.bin").read_bytes()


@pytest.mark.parametrize("profile", DTYPES)
def test_the_identity_is_what_it_was(profile: str) -> None:
    """Calibration files are named as when they were written, and so are codecs."""
    stated = json.loads((GOLDEN / "codecs.json").read_text())[profile]
    blob = golden_blob(profile)

    assert codec_of(profile).codec_id.hex() == stated["codec_id"]
    assert hashlib.sha256(blob).hexdigest() == stated["sha256"]
    sections = {name: len(part.data) for name, part in read_blob(blob).sections.items()}
    assert sections == stated["sections"]


@pytest.mark.parametrize("profile", DTYPES)
def test_a_golden_blob_decodes_to_what_it_did(profile: str) -> None:
    """Blobs on disks outlive this build."""
    keys, values = codec_of(profile).decode(golden_blob(profile))
    source = golden_cache(profile)

    with np.load(GOLDEN / f"codec_{profile}.npz") as wanted:
        for name, found in (("keys", keys), ("values", values)):
            again = torch.from_numpy(wanted[name])
            # A unit in the last place of float16, which is what the entropy one holds.
            rtol = {"raw": 0.0, "paper": 1e-5, "entropy": 2e-3}[profile]
            torch.testing.assert_close(found.float(), again, rtol=rtol, atol=10 * rtol)
    for found, made in zip((keys, values), source, strict=True):
        assert torch.equal(found[:4], made[:4])
        assert torch.equal(found[9], made[9])


def test_the_raw_golden_blob_is_written_byte_for_byte() -> None:
    """Nothing is computed, so nothing may differ."""
    codec = codec_of("raw")
    described = synthetic.header(codec.codec_id, NUM_TOKENS, dtype=DTYPES["raw"])

    assert codec.encode(*golden_cache("raw"), header=described) == golden_blob("raw")


def test_golden_streams_are_written_byte_for_byte() -> None:
    """Symbols decoded from the golden streams give those streams: in whole numbers only."""
    codec, blob = codec_of("entropy"), read_blob(golden_blob("entropy"))
    shift_T = np.frombuffer(blob.section("shift").data, np.int8).astype(np.int32)
    models = codec.calibration.classes.models
    count = 0
    for kind, part in (("k", codec.calibration.keys), ("v", codec.calibration.values)):
        for number, band in enumerate(part.bands):
            if band.start == band.stop:
                continue
            level_C = part.layout.rows(band).level_C
            stream = blob.section(f"{kind}.{number}").data

            symbols = decode_symbols(stream, level_C, models, len(shift_T), shift_T=shift_T)

            assert encode_symbols(symbols, level_C, models, shift_T) == bytes(stream)
            count += 1
    assert count >= 4


def test_the_golden_shifts_are_those_of_the_keys() -> None:
    """The importance in the file, applied to what was encoded."""
    codec, blob = codec_of("entropy"), read_blob(golden_blob("entropy"))
    keys, _ = golden_cache("entropy")
    made: Importance = codec.calibration.importance
    rows = codec.calibration.rotary.unrotate(keys, torch.arange(NUM_TOKENS)).flatten(1)
    exact = np.frombuffer(blob.section("exact.rows").data, "<u4")

    shift_T = np.delete(made.shifts(rows), exact)

    stored = np.frombuffer(blob.section("shift").data, np.int8)
    assert np.abs(shift_T - stored).max() <= 1
    assert (shift_T == stored).mean() > 0.9
