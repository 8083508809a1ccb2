"""Pictures of a calibration's report; needs matplotlib, which is loaded only to draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from codec.errors import BackendUnavailable

KINDS: Final = ("keys", "values")
COLORS: Final = {"keys": "tab:blue", "values": "tab:orange"}
LINES: Final = ("-", "--", ":", "-.")

Stage = Mapping[str, Any]
"""A stage of ``report.json``."""


def check_plots() -> None:
    """See that pictures can be drawn.

    Raises
    ------
    BackendUnavailable
        If they cannot.
    """
    if find_spec("matplotlib") is None:
        raise BackendUnavailable("matplotlib", "run `pip install kvfabric[plots]`")


def draw_report(content: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw every picture of every stage as PNG and as SVG; where they are."""
    paths = []
    stages = content["stages"]
    for stage in stages:
        mark = f"-{stage['stage'].replace(' ', '-')}" if len(stages) > 1 else ""
        title = f"{content['model']}, stage {stage['stage']}"
        for name, draw in _PICTURES.items():
            paths += _save(draw, stage, title, folder / f"{name}{mark}")
    return paths


def _save(draw: Callable[[Any, Stage], None], stage: Stage, title: str, path: Path) -> list[Path]:
    check_plots()
    import matplotlib as mpl  # noqa: PLC0415 - only those who draw need it
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    draw(axes, stage)
    axes.set_title(title, fontsize="medium")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    written = []
    # Equal data, equal file.
    with mpl.rc_context({"svg.hashsalt": "kvfabric"}):
        for ending in (".png", ".svg"):
            target = path.with_name(path.name + ending)
            metadata = {"Date": None} if ending == ".svg" else None
            figure.savefig(target, dpi=150, metadata=metadata)
            written.append(target)
    return written


def _lines(stage: Stage) -> list[tuple[str, Mapping[str, Any], str, dict[str, Any]]]:
    """Kind, its numbers, label and style of every line: a color by kind, a dash by target."""
    return [
        (
            kind,
            target[kind],
            f"{kind}, {target['profile']} {target['target']:g}x",
            {"color": COLORS[kind], "linestyle": LINES[number % len(LINES)], "linewidth": 1.3},
        )
        for number, target in enumerate(stage["targets"])
        for kind in KINDS
    ]


def _spectrum(axes: Any, stage: Stage) -> None:  # noqa: ANN401 - matplotlib is untyped
    widest = max(stage["targets"], key=lambda target: target["keys"]["rank"])
    for kind in KINDS:
        variance = widest[kind]["variance_C"]
        label = f"{kind}: {len(variance)} of {widest[kind]['width']} kept"
        axes.plot(range(1, len(variance) + 1), variance, label=label, color=COLORS[kind])
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="coefficient, most important first",
        ylabel="variance on held-out text",
    )


def _bits(axes: Any, stage: Stage) -> None:  # noqa: ANN401
    for _, part, label, style in _lines(stage):
        axes.plot(range(1, part["rank"] + 1), part["bits_C"], label=label, **style)
    axes.set(xscale="log", xlabel="coefficient, most important first", ylabel="bits per token")


def _curve(axes: Any, stage: Stage) -> None:  # noqa: ANN401
    bits = [point["bits_per_token"] for point in stage["curve"]]
    is_weighted = any(target["profile"] == "entropy" for target in stage["targets"])
    space = ", in the metric" if is_weighted else ""
    for kind, name in (("keys", "key_error"), ("values", "value_error")):
        errors = [point[name] for point in stage["curve"]]
        axes.plot(bits, errors, marker="o", label=kind, color=COLORS[kind])
    for point in stage["curve"]:
        place = (point["bits_per_token"], max(point["key_error"], point["value_error"]))
        axes.annotate(
            f"{point['target']:g}x",
            place,
            textcoords="offset points",
            xytext=(4, 6),
            fontsize="small",
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="bits per token on held-out text",
        ylabel=f"squared error over variance{space}",
    )
    axes.margins(x=0.08, y=0.12)


def _layers(axes: Any, stage: Stage) -> None:  # noqa: ANN401
    for _, part, label, style in _lines(stage):
        errors = part["layer_error_L"]
        first = stage["first_layer"]
        axes.plot(range(first, first + len(errors)), errors, label=label, marker=".", **style)
    axes.set(yscale="log", xlabel="layer", ylabel="squared error over variance")
    axes.xaxis.get_major_locator().set_params(integer=True)


_PICTURES: Final[Mapping[str, Callable[[Any, Stage], None]]] = {
    "spectrum": _spectrum,
    "bits": _bits,
    "rate-distortion": _curve,
    "layer-error": _layers,
}
