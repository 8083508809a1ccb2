"""Draw rate against KL from records of ``kvfabric bench codec``, a panel for each.

.venv/bin/python benchmarks/plot_codec.py benchmarks/results/codec_*.json --out docs/images/rate_kl.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[1] / "docs" / "images" / "rate_kl.svg"
STYLES = {"paper": ("#b35806", "s"), "entropy": ("#2166ac", "o")}
RIVAL = ("#666666", "x")
_TEXT: dict[str, Any] = {"textcoords": "offset points", "fontsize": 7}
BESIDE: dict[str | None, dict[str, Any]] = {
    "paper": _TEXT | {"xytext": (5, -8)},
    "entropy": _TEXT | {"xytext": (-5, 4), "ha": "right"},
    None: _TEXT | {"xytext": (5, 4)},
}
LOSSLESS = 1e-9
"""Below it there is nothing but rounding, and no place on a logarithmic axis."""
NEAR = 1.3
"""Rivals within this factor of each other, in ratio and in KL, share a label."""


def families(arms: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Arms that lost something, by profile and rising ratio; rivals are a family each."""
    found: dict[str, list[dict[str, Any]]] = {}
    for arm in sorted(arms, key=lambda arm: arm["net_ratio"]):
        if arm["kl"] > LOSSLESS:
            found.setdefault(arm["profile"], []).append(arm)
    return found


def labels(arms: list[dict[str, Any]]) -> list[tuple[str, tuple[float, float]]]:
    """Names of rivals and where they stand; those at one place are named together."""
    groups: list[list[dict[str, Any]]] = []
    for arm in arms:
        if arm["profile"] in STYLES or arm["kl"] <= LOSSLESS:
            continue
        near = (
            group
            for group in groups
            if all(1 / NEAR < arm[key] / group[0][key] < NEAR for key in ("kl", "net_ratio"))
        )
        group = next(near, None)
        if group is None:
            groups.append([arm])
        else:
            group.append(arm)
    return [
        (", ".join(arm["arm"] for arm in group), (group[0]["kl"], group[0]["net_ratio"]))
        for group in groups
    ]


def draw_panel(axes: Any, record: dict[str, Any]) -> None:  # noqa: ANN401 - matplotlib is untyped
    """Curves of the profiles with the intervals of their KL, and the rivals as points."""
    for profile, arms in families(record["figures"]["arms"]).items():
        color, marker = STYLES.get(profile, RIVAL)
        ratios = [arm["net_ratio"] for arm in arms]
        kls = [arm["kl"] for arm in arms]
        around = [
            [arm["kl"] - arm["kl_interval"][0] for arm in arms],
            [arm["kl_interval"][1] - arm["kl"] for arm in arms],
        ]
        axes.errorbar(
            kls,
            ratios,
            xerr=around,
            color=color,
            marker=marker,
            markersize=5,
            linewidth=1.5 if profile in STYLES else 0,
            elinewidth=0.8,
            label=profile if profile in STYLES else None,
        )
        if profile in STYLES:
            for arm in arms:
                at = (arm["kl"], arm["net_ratio"])
                axes.annotate(f"{arm['target']:g}x", at, color=color, **BESIDE[profile])
    for names, at in labels(record["figures"]["arms"]):
        axes.annotate(names, at, color=RIVAL[0], **BESIDE[None])
    axes.set(xscale="log", yscale="log", xlabel="mean KL to full precision, nats per token")
    tokens = record["figures"]["arms"][0]["num_tokens"]
    axes.set_title(f"{record['model']}, {tokens:,} tokens, {record['date']}", fontsize=9)
    ticks = [1, 2, 4, 8, 16, 32, 64, 128]
    axes.set_yticks(ticks, [f"{tick}x" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.25)


def draw(records: list[dict[str, Any]], out: Path) -> None:
    """One picture of all records."""
    # Here, so that a missing matplotlib is said by those who draw alone.
    import matplotlib as mpl  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    # Equal data, equal file.
    mpl.rcParams["svg.hashsalt"] = "kvfabric"
    figure = Figure(figsize=(6.2 * len(records), 4.6), layout="constrained")
    panels = figure.subplots(1, len(records), squeeze=False)[0]
    for axes, record in zip(panels, records, strict=True):
        draw_panel(axes, record)
    panels[0].set_ylabel("net compression, everything counted")
    panels[0].legend(loc="upper left")
    out.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if out.suffix == ".svg" else None
    figure.savefig(out, dpi=150, metadata=metadata)


def main() -> None:
    """Read, draw and say where."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    if options.out.suffix not in {".svg", ".png"}:
        parser.error(f"--out must end in .svg or .png, got {options.out}")
    try:
        records = [json.loads(path.read_text(encoding="utf-8")) for path in options.records]
    except (OSError, ValueError) as error:
        parser.error(f"cannot read a record: {error}")
    draw(records, options.out)
    print(f"drawn: {options.out}")


if __name__ == "__main__":
    main()
