"""Seeded damage to blobs of every codec: none may decode, crash, or allocate without bound.

Two kinds of mutants.  *Plain* ones are a written blob with bits flipped, bytes set, runs
cut, doubled or moved, or lengths edited; a decoder must refuse every one that is not a blob
as written.  *Sealed* ones have section bytes, names, sizes or header fields changed and all
checksums made right again, so that what lies behind the checksums is reached; these are
refused too, or decode to finite tensors of the right shape.

The large run: ``python -m tests.suites.mutations --count 100000 --seed 1``.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import struct
import sys
import tracemalloc
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from codec.blob import BlobHeader, Section, pack_blob, read_blob
from codec.entropy_codec import EntropyCodec
from codec.errors import CodecError
from codec.kvtc import KvtcCodec
from codec.raw import RawCodec
from tests.codec import entropy_samples, synthetic

NUM_TOKENS = 40
#: Numpy and bytes that decoding one mutant may hold, beyond what its header allows.
SLACK_BYTES = 4 << 20
#: Numbers that lengths and fields are set to.
EDGES = (0, 1, 2, 3, 4, 7, 8, 31, 32, 39, 41, 255, 256, 65535, 65536, 2**31 - 1, 2**32 - 1)


@dataclass(frozen=True)
class Subject:
    """A codec, two of its blobs, and what the first decodes to."""

    codec: Any
    blob: bytes
    other: bytes

    @property
    def header(self) -> BlobHeader:
        """Of the blob."""
        return read_blob(self.blob).header


@dataclass
class Outcome:
    """What became of the mutants, and everything that must not have happened."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    peak_bytes: int = 0


def subjects() -> dict[str, Subject]:
    """One of each codec and dtype that matter: raw, paper, entropy."""
    made = {}
    paper = KvtcCodec(synthetic.calibrated())
    raw = RawCodec(synthetic.GEOMETRY.whole, synthetic.GEOMETRY, "bfloat16")
    for codec, dtype in ((raw, "bfloat16"), (paper, "float32")):
        blobs = [
            codec.encode(
                *synthetic.cache(NUM_TOKENS, seed=seed, dtype=dtype),
                header=synthetic.header(codec.codec_id, NUM_TOKENS, dtype=dtype),
            )
            for seed in (1, 2)
        ]
        made[codec.name] = Subject(codec, *blobs)
    # With sinks, that is exact rows, and without.
    for target, start in ((4.0, 0), (16.0, 512)):
        codec = entropy_samples.codec_of(target)
        caches = [
            entropy_samples.rotated_cache(NUM_TOKENS, seed=seed, start=start) for seed in (1, 2)
        ]
        blobs = [entropy_samples.encoded(codec, cached, start=start) for cached in caches]
        made[f"entropy {target:g}"] = Subject(codec, *blobs)
    return made


def spoil(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """``data`` with a few bytes or one run changed; never shorter than nothing."""
    kind = rng.randrange(8)
    mutant = bytearray(data)
    if kind < 4 and mutant:
        for _ in range(rng.choice((1, 1, 1, 2, 8))):
            at = rng.randrange(len(mutant))
            if kind < 2:
                mutant[at] ^= 1 << rng.randrange(8)
            else:
                mutant[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        return bytes(mutant)
    start, stop = sorted(rng.choices(range(len(mutant) + 1), k=2))
    run = data[start:stop]
    if kind == 4:
        return data[:start]
    if kind == 5:
        return data + rng.randbytes(rng.randrange(1, 9))
    new = rng.choice((b"", run + run, rng.randbytes(len(run)), other[start:stop], run[::-1]))
    return data[:start] + new + data[stop:]


def plain_mutant(rng: random.Random, subject: Subject) -> bytes:
    """A blob as an accident leaves it."""
    kind = rng.randrange(4)
    if kind == 0:
        sections = list(read_blob(subject.blob).sections.values())
        front = len(subject.blob) - sum(len(section.data) for section in sections)
        rng.shuffle(sections)
        return subject.blob[:front] + b"".join(bytes(section.data) for section in sections)
    if kind == 1:
        mutant = bytearray(subject.blob)
        at = rng.choice((4, 6, 8, 12, rng.randrange(16, 600)))
        struct.pack_into("<I", mutant, at, rng.choice(EDGES))
        return bytes(mutant)
    return spoil(rng, subject.blob, subject.other)


def front_mutant(rng: random.Random, subject: Subject) -> bytes:
    """A header or table with bytes changed, under a checksum that is right."""
    sections = read_blob(subject.blob).sections.values()
    size = len(subject.blob) - sum(len(section.data) for section in sections) - 16
    front = bytearray(subject.blob[:size])
    for _ in range(rng.randrange(1, 4)):
        front[rng.randrange(8, size)] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
    return bytes(front) + xxhash.xxh3_128_digest(front) + subject.blob[size + 16 :]


def sealed_mutant(rng: random.Random, subject: Subject) -> bytes:
    """A blob of a writer that lies: its checksums are right."""
    if rng.randrange(4) == 0:
        return front_mutant(rng, subject)
    read = read_blob(subject.blob)
    header, sections = read.header, dict(read.sections)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name = rng.choice(list(sections))
        old = sections[name]
        kind = rng.randrange(8)
        if kind == 0 and len(sections) > 1:
            del sections[name]
        elif kind == 1:
            twin = rng.choice(list(sections))
            sections[name] = Section(name, sections[twin].data, old.decoded_bytes)
        elif kind == 2:
            sections[name] = Section(name, old.data, rng.choice((*EDGES[:14], len(old.data))))
        elif kind == 3:
            header = other_header(rng, header)
        else:
            data = spoil(rng, bytes(old.data), bytes(old.data)[::-1])
            same = old.decoded_bytes == len(old.data)
            sections[name] = Section(name, data, len(data) if same else old.decoded_bytes)
    try:
        return pack_blob(header, list(sections.values()))
    except ValueError:
        return subject.blob


def other_header(rng: random.Random, header: BlobHeader) -> BlobHeader:
    """One of the fields that a codec does not compare with its own."""
    change: dict[str, Any] = rng.choice(
        (
            {"num_tokens": rng.choice((1, 2, 39, 41, 64, 4096, 1 << 20))},
            {"start_position": rng.choice((0, 1, 3, 2**20, 2**30))},
            {"dtype": rng.choice(("float32", "bfloat16", "float16"))},
        )
    )
    return dataclasses.replace(header, **change)


def judge(subject: Subject, mutant: bytes, outcome: Outcome, *, sealed: bool, cut: bool) -> None:
    """Decode one mutant and note what became of it."""
    kind = "sealed" if sealed else "plain"
    options = {"allow_truncated": True} if cut else {}
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    bound = SLACK_BYTES + 8 * len(mutant)
    try:
        tensors = subject.codec.decode(mutant, **options)
    except CodecError as error:
        outcome.counts[f"{kind}: {type(error).__name__}"] += 1
    except Exception as error:  # noqa: BLE001 - any other error is what is looked for
        outcome.faults.append(f"{kind} raised {type(error).__name__}: {error}")
    else:
        header = read_blob(mutant, allow_truncated=cut).header
        bound += 4 * header.decoded_bytes_bound
        outcome.counts[f"{kind}: decoded"] += 1
        outcome.faults += [f"{kind} {fault}" for fault in faults_of(subject, header, tensors)]
        # Bytes after the last whole section of a cut blob are not read, and may be anything.
        if not sealed and not (cut and _is_prefix(subject, mutant)):
            outcome.faults.append("plain damage was decoded")
    peak = tracemalloc.get_traced_memory()[1] - before
    outcome.peak_bytes = max(outcome.peak_bytes, peak)
    if peak > bound:
        outcome.faults.append(f"{kind} allocated {peak} bytes, over {bound}")


def _is_prefix(subject: Subject, mutant: bytes) -> bool:
    """Whether a cut blob has nothing but the header and the first sections that were written."""
    written, found = read_blob(subject.blob), read_blob(mutant, allow_truncated=True)
    first = dict(list(written.sections.items())[: len(found.sections)])
    return found.header == written.header and found.sections == first


def faults_of(
    subject: Subject, header: BlobHeader, tensors: tuple[torch.Tensor, torch.Tensor]
) -> list[str]:
    """What is wrong with the tensors of a mutant that was decoded."""
    shape = (header.num_tokens, header.num_layers, header.num_heads)
    dims = (header.key_head_dim, header.value_head_dim)
    found = []
    for tensor, dim in zip(tensors, dims, strict=True):
        if tuple(tensor.shape) != (*shape, dim):
            found.append(f"decoded to shape {tuple(tensor.shape)}, not {(*shape, dim)}")
        if not subject.codec.is_lossless and not torch.isfinite(tensor).all():
            found.append("decoded to what is not finite")
    return found


def run(count: int, seed: int) -> Outcome:
    """Judge ``count`` mutants, codecs in turn; equal seeds give equal mutants."""
    rng = random.Random(seed)
    made = subjects()
    outcome = Outcome()
    tracemalloc.start()
    try:
        for number in range(count):
            subject = list(made.values())[number % len(made)]
            sealed = rng.random() < 0.5
            cut = not sealed and isinstance(subject.codec, EntropyCodec) and rng.random() < 0.25
            mutant = (sealed_mutant if sealed else plain_mutant)(rng, subject)
            # A cut is what `allow_truncated` takes; any other damage it must refuse as well.
            if mutant in (subject.blob, subject.other) or (cut and subject.blob.startswith(mutant)):
                outcome.counts["not a mutant"] += 1
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                judge(subject, mutant, outcome, sealed=sealed, cut=cut)
    finally:
        tracemalloc.stop()
    return outcome


def main() -> int:
    """Run as many as asked for, and say what became of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    outcome = run(asked.count, asked.seed)
    lines = [f"{name}: {number}" for name, number in sorted(outcome.counts.items())]
    lines += [f"peak bytes: {outcome.peak_bytes}", f"faults: {len(outcome.faults)}"]
    sys.stdout.write("\n".join([*lines, *outcome.faults[:20]]) + "\n")
    return bool(outcome.faults)


if __name__ == "__main__":
    sys.exit(main())
