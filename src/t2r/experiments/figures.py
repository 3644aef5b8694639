"""Draws the figure of README.md from a record: `python -m t2r.experiments.figures docs/decoding.svg`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from t2r.errors import T2RError
from t2r.experiments.record import recorded

EXPERIMENT, BATCH = "smollm2-decode-gpu", 16
ROWS = {
    "smollm2, engine": "SmolLM2-135M",
    "kept, engine": "converted, 7 softmax layers",
    "pure, engine": "converted: an RNN",
    "smollm2, window of 390, engine": "SmolLM2-135M, window of 390",
}
"""The models in the figure, all decoded by the engine, and their labels."""


def draw(path: str) -> None:
    """Draw time per step and memory per sequence by context length."""
    import matplotlib
    from matplotlib.figure import Figure

    report = decoding_report()
    batch = report["settings"]["batch"]
    with matplotlib.rc_context({"svg.hashsalt": "t2r", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(8, 2.8), facecolor="white", layout="constrained")
        time, memory = figure.subplots(1, 2)
        for name, label in ROWS.items():
            own = [point for point in report["points"] if point["model"] == name]
            lengths = [point["length"] for point in own]
            style = "--" if "window" in name else "-"
            time.plot(lengths, [point["milliseconds"] for point in own], style, marker="o", label=label)
            held = [point["cache_bytes"] / batch / 2**20 for point in own]
            memory.plot(lengths, held, style, marker="o", label=label)
        time.set(title=f"ms per step, batch {batch}, one H200", xlabel="tokens before", ylim=(0, None))
        memory.set(title="MiB per sequence", xlabel="tokens before", ylim=(0, None))
        time.legend(frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None})


def decoding_report() -> Mapping[str, Any]:
    record = recorded(EXPERIMENT)
    if record is None:
        raise T2RError(f"{EXPERIMENT} is not recorded: run t2r reproduce {EXPERIMENT}")
    reports: list[Mapping[str, Any]] = record["steps"][0]["result"]
    return next(report for report in reports if report["settings"]["batch"] == BATCH)


if __name__ == "__main__":
    draw(sys.argv[1])
