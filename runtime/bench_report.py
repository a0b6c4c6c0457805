"""The result document of `bench` as text and as a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bitnest_format.runtime.bench import MODE_LABELS

NOTHING = "-"


def render(document: Mapping[str, Any]) -> str:
    """Everything but raw timings, as lines to read."""
    model, settings, machine = document["model"], document["settings"], document["machine"]
    predicted = document["kind"] == "prediction"
    title = "PREDICTION from bytes and bandwidth, not a measurement" if predicted else "Measurement"
    lines = [
        f"{title}: {model['name']} ({model['weights']}) on {machine['name']}, {document['date']}",
        f"{document['acceptance']['label']}; {_head(settings['head'])} head",
        ", ".join(f"{name} {number}" for name, number in document["versions"].items() if number),
    ]
    ceiling = document["read_ceiling"]
    if ceiling:
        lines.append(f"read ceiling {ceiling['bytes_per_second'] / 1e12:.2f} TB/s; % is the share of it")
    elif predicted:
        lines.append(f"% is the share of {machine['bandwidth_bytes_per_second'] / 1e9:g} GB/s")
    if document["results"]:
        lines += ["", *_speed_table(document["results"]), "", *_phase_table(document["results"])]
    if document.get("kernels"):
        lines += ["", *_kernel_table(document["kernels"])]
    lines += [f"Note: {note}" for note in document["notes"]]
    return "\n".join(lines)


def draw(document: Mapping[str, Any], path: Path) -> str | None:
    """Draw tokens a second and speed-up over the context into `path`; why not, where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return "no plot was drawn: install matplotlib for it"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    predicted = document["kind"] == "prediction"
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for mode in document["settings"]["modes"]:
        rows = [row for row in document["results"] if row["mode"] == mode and row["fits"]]
        contexts = [row["context"] for row in rows]
        left.plot(contexts, [row["tokens_per_second"] for row in rows], marker="o", label=MODE_LABELS[mode])
        speedups = [math.nan if row["speedup"]["over_half"] is None else row["speedup"]["over_half"] for row in rows]
        right.plot(contexts, speedups, marker="o", label=MODE_LABELS[mode])
    for axes, label in ((left, "tokens/s"), (right, "times fp16")):
        axes.set(xscale="log", xlabel="context, tokens", ylabel=label)
        axes.set_xticks(document["settings"]["contexts"], [str(c) for c in document["settings"]["contexts"]])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.legend()
    mark = "PREDICTION, " if predicted else ""
    figure.suptitle(f"{mark}{document['model']['name']} on {document['machine']['name']}", fontsize=11)
    figure.text(0.5, 0.01, document["acceptance"]["label"], ha="center", fontsize=8)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return None


def _speed_table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    header = (
        "context",
        "mode",
        "tokens/s",
        "x fp16",
        "x W8A8",
        "tokens/round",
        "ms/round",
        "GB/s",
        "%",
        "GiB",
        "J/token",
    )
    rows = []
    for row in results:
        cells = [str(row["context"]), MODE_LABELS[row["mode"]]]
        cells += [
            f"{row['tokens_per_second']:.1f}",
            _number(row["speedup"]["over_half"], ".2f"),
            _number(row["speedup"]["over_target"], ".2f"),
            f"{row['tokens_per_round']:.2f}",
            f"{1e3 * row['seconds_per_round']:.3f}",
            f"{row['bytes_per_second'] / 1e9:.0f}",
            f"{100 * row['share_of_read_ceiling']:.0f}",
            f"{row['memory_bytes']['total'] / 2**30:.1f}" + ("" if row["fits"] else " (too much)"),
            _number(row["joules_per_token"], ".3f"),
        ]
        rows.append(cells)
    return table(header, rows)


def _phase_table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    header = ("context", "mode", "pass", "ms", "GB read", "linears", "head", "cache", "GB/s", "%", "nodes/layer")
    rows = []
    for row in results:
        for name, phase in row["phases"].items():
            nodes = row.get("node_counts", {})
            read = phase["bytes"]
            cells = [str(row["context"]), MODE_LABELS[row["mode"]], name, f"{1e3 * phase['seconds']:.3f}"]
            cells += [f"{read[part] / 1e9:.2f}" for part in ("total", "linears", "head", "cache")]
            cells += [f"{phase['bytes_per_second'] / 1e9:.0f}", f"{100 * phase['share_of_read_ceiling']:.0f}"]
            layer = nodes.get("draft_layer" if name == "draft" else "verify_layer")
            rows.append([*cells, _number(layer, "g")])
    return table(header, rows)


def _kernel_table(kernels: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        [
            kernel["name"],
            f"{1e6 * kernel['seconds']:.2f}",
            f"{kernel['bytes'] / 1e6:.2f}",
            f"{kernel['bytes_per_second'] / 1e9:.0f}",
            f"{100 * kernel['share_of_read_ceiling']:.0f}",
        ]
        for kernel in kernels
    ]
    return table(("kernel", "us", "MB read", "GB/s", "%"), rows, left=1)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 0) -> list[str]:
    """Lines of columns: the first `left` ones flush left, the others flush right."""
    cells = [list(header), *([*row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def _head(kind: str) -> str:
    return "16-bit" if kind == "half" else kind


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else format(value, form)
