"""rANS of the byte planes of bfloat16 elements: what an order-0 entropy coder makes of them.

Low and high bytes of each layer have a table of frequencies of their own, which is stored
with them.  So a stream adapts to what it holds, as nvCOMP's ANS does by a table per piece
of it; layers differ more than pieces of one do.

Bytes of one kind: ``1024 L`` of tables (256 u16 per plane and layer, little-endian), then
one stream of `codec.entropy.rans`: all low bytes, then all high ones, each by layer, head
and dimension, the tokens of one innermost.  Its size is the planes' order-0 entropy, plus
what tables of whole 4096ths lose (under 0.1 % of it) and 128 bytes of states.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.comparators.wire import tensor_bytes, to_bfloat16
from codec.entropy.models import SymbolModels
from codec.entropy.rans import decode_symbols, encode_symbols

_ALPHABET = 256
_PLANES = 2
TABLE_BYTES = 2 * _ALPHABET
"""Of one plane of one layer."""


@dataclass(frozen=True, slots=True)
class RansCoder:
    """Codes each byte of the bfloat16 elements under the static model of its plane and layer."""

    def encode(self, array_TLHD: Tensor) -> bytes:
        """Tables, then the stream."""
        num_tokens, num_layers = array_TLHD.shape[:2]
        data = tensor_bytes(to_bfloat16(array_TLHD).flatten(1).T)
        planes_NP = np.frombuffer(data, dtype=np.uint8).reshape(-1, _PLANES)
        symbols_CT = np.ascontiguousarray(planes_NP.T).reshape(-1, num_tokens)
        by_model = symbols_CT.reshape(_PLANES * num_layers, -1)
        counts_KA = np.stack([np.bincount(row, minlength=_ALPHABET) for row in by_model])
        models = SymbolModels.fit(counts_KA, floor=False)
        model_of_C = _model_of_coefficient(tuple(array_TLHD.shape))
        tables = models.freq_KA.astype("<u2").tobytes()
        return tables + encode_symbols(symbols_CT, model_of_C, models)

    def decode(self, data: bytes, shape: tuple[int, ...]) -> Tensor:
        """See `codec.comparators.arm.ArrayCoder.decode`."""
        num_models = _PLANES * shape[1]
        tables = np.frombuffer(data[: num_models * TABLE_BYTES], dtype="<u2")
        if tables.size != num_models * _ALPHABET:
            raise ValueError(f"need {num_models} tables, got {len(data)} bytes in all")
        models = SymbolModels(tables.reshape(num_models, _ALPHABET))
        stream = data[num_models * TABLE_BYTES :]
        symbols_CT = decode_symbols(stream, _model_of_coefficient(shape), models, shape[0])
        planes_NP = np.ascontiguousarray(symbols_CT.reshape(_PLANES, -1).T)
        elements = torch.from_numpy(planes_NP.reshape(-1)).view(torch.bfloat16)
        return elements.view(-1, shape[0]).T.float().contiguous().view(shape)


def _model_of_coefficient(shape: tuple[int, ...]) -> NDArray[np.int32]:
    """Shape ``(C,)``: which table the tokens of one byte of one coefficient are coded with."""
    models_K = np.arange(_PLANES * shape[1], dtype=np.int32)
    return np.repeat(models_K, prod(shape[2:]))
