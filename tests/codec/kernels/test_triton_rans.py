"""The kernels code as the processor does: run under Triton's interpreter, built for a device."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from codec.entropy.models import SymbolModels
from codec.entropy.rans import encode_symbols
from tests.codec.kernels.interpreter import HAS_TRITON, interpreting, why_not_interpreted
from tests.codec.test_rans import StreamsSuite, Symbols

MODULE = "codec.kernels.triton_rans"
#: Types of the kernels' arguments, as they are launched.
SIGNATURES = {
    "_encode_kernel": "*u8 *i64 *i32 *i32 *u32 *u16 *i64 i32",
    "_decode_kernel": "*u16 *i64 *i32 *i32 *u32 *u8 *u8 *i32 i32",
}
#: Ampere and Hopper, and a warp of 32 lanes; nothing is run, so no device is needed.
BUILD = f"""
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import {MODULE} as kernels

for name, types in {SIGNATURES}.items():
    kernel = getattr(kernels, name)
    signature = dict(zip(kernel.arg_names, types.split(), strict=True))
    for capability in (80, 90):
        source = ASTSource(fn=kernel, signature=signature, constexprs={{}})
        target = GPUTarget("cuda", capability, 32)
        built = triton.compile(source, target=target, options=kernels._ONE_WARP)
        layout = "sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [1]"
        assert layout in built.asm["ttgir"], built.asm["ttgir"]
        ptx = built.asm["ptx"]
        assert "shr.s32" not in ptx and "div.s32" not in ptx, ptx
        print(name, capability)
"""


WHY_NOT = why_not_interpreted("triton_rans")
KERNELS: Any = None if WHY_NOT else importlib.import_module(MODULE)


@pytest.fixture(autouse=True, scope="module")
def interpret() -> Iterator[None]:
    """Launches are interpreted, too."""
    with interpreting():
        yield


@pytest.mark.skipif(KERNELS is None, reason=WHY_NOT)
class TestInterpreted(StreamsSuite):
    """The suite of all coders of this format."""

    def encode(
        self,
        symbols: Sequence[Symbols],
        model_of: Sequence[Any],
        models: SymbolModels,
        shifts: Sequence[Any] | None = None,
    ) -> list[bytes]:
        """See `triton_rans.encode_streams`."""
        tables = KERNELS.DeviceModels.of(models, torch.device("cpu"))
        streams: list[bytes] = KERNELS.encode_streams(
            [torch.from_numpy(array) for array in symbols], model_of, tables, shifts
        )
        return streams

    def decode(
        self,
        streams: Sequence[bytes],
        model_of: Sequence[Any],
        models: SymbolModels,
        num_tokens: Sequence[int],
        shifts: Sequence[Any] | None = None,
    ) -> list[Symbols]:
        """See `triton_rans.decode_streams`."""
        tables = KERNELS.DeviceModels.of(models, torch.device("cpu"))
        decoded = KERNELS.decode_streams(streams, model_of, tables, num_tokens, shifts)
        return [array.numpy() for array in decoded]

    def test_lists_of_other_lengths_are_refused(self) -> None:
        """Each stream has its models and its tokens."""
        models = SymbolModels(np.array([[4096]]))
        one = np.zeros((1, 2), np.uint8)

        with pytest.raises(ValueError, match="need one model number"):
            self.encode([one], [[0], [0]], models)
        with pytest.raises(ValueError, match="for each stream"):
            self.decode([b"", b""], [[], []], models, [0])
        for shifts in ([], [None] * 2):
            with pytest.raises(ValueError, match="for each stream"):
                self.encode([one], [[0]], models, shifts)
            with pytest.raises(ValueError, match="for each stream"):
                self.decode([b"\x00\x00\x01\x00" * 2], [[0]], models, [2], shifts)


@pytest.mark.skipif(KERNELS is None, reason=WHY_NOT)
@pytest.mark.parametrize("num_words", [0, 1, 40, 63, 64, 70, 100])
def test_words_past_the_end_of_a_stream_are_not_read(num_words: int) -> None:
    """Not even if a stream is shorter than the host should have let through."""
    models = SymbolModels(np.array([[1] * 255 + [3841]]))
    tables = KERNELS.DeviceModels.of(models, torch.device("cpu"))
    symbols_CT = np.random.default_rng(2).integers(0, 255, (4, 33)).astype(np.uint8)
    stream = encode_symbols(symbols_CT, [0] * 4, models)
    words = np.frombuffer(stream, "<u2").astype(np.uint16)
    cut = words.copy()
    cut[num_words:] = 0
    # A lane without a state starts at the least one; a state is two words or none.
    cut[max(1, num_words // 2 * 2 + 1) : 64 : 2] = 1
    cut[num_words // 2 * 2 : 64 : 2] = 0

    found, wanted = torch.zeros(2, 4 * 33, dtype=torch.uint8)
    flag = torch.ones(1, dtype=torch.int32)
    for array, size, symbols in ((words, num_words, found), (cut, len(cut), wanted)):
        KERNELS._decode_kernel[(1,)](
            torch.from_numpy(array),
            torch.tensor([[0, size, 0, 0, 0, 4, 33]]),
            torch.zeros(4, dtype=torch.int32),
            torch.zeros(33, dtype=torch.int32),
            tables.share_KA,
            tables.symbol_of_slot_KS,
            symbols,
            flag,
            models.num_models,
        )
        # The other may end well: noughts are a stream of something.
        assert symbols is wanted or not flag.item()

    assert torch.equal(found, wanted)
    assert found.tolist() != symbols_CT.ravel().tolist()


@pytest.mark.skipif(KERNELS is None, reason=WHY_NOT)
@pytest.mark.parametrize("symbol", [0, 1, 2, 255])
def test_a_stream_fills_no_more_than_its_room(symbol: int) -> None:
    """Whether every symbol gives a word or none can be coded."""
    models = SymbolModels(np.array([[1, 0, 4095]]))
    tables = KERNELS.DeviceModels.of(models, torch.device("cpu"))
    room = 2 * 32 + 3 * 33
    words = torch.full((room + 20,), 7, dtype=torch.int32).to(torch.uint16)
    used = torch.zeros(1, dtype=torch.int64)

    KERNELS._encode_kernel[(1,)](
        torch.full((3 * 33,), symbol, dtype=torch.uint8),
        torch.tensor([[10, room, 0, 0, 0, 3, 33]]),
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(33, dtype=torch.int32),
        tables.share_KA,
        words,
        used,
        models.num_models,
    )

    around = words[:10].tolist() + words[room + 10 :].tolist()
    assert around == [7] * 20
    assert (used.item() == -1) == (symbol in {1, 255})


@pytest.mark.skipif(not HAS_TRITON, reason=WHY_NOT)
def test_kernels_can_be_built_for_devices(tmp_path: Path) -> None:
    """The interpreter takes much that the compiler refuses; one lane is one thread."""
    environment = {name: value for name, value in os.environ.items() if "TRITON" not in name}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}

    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", BUILD],
        env=environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2 * len(SIGNATURES)
