"""Measured loads as a picture. Knows summaries and matplotlib, which is an optional package."""

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from detour.bench.report import Details, Summary


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def plot(summaries: Sequence[Summary], details: Sequence[Details], path: Path) -> None:
    """A PNG (or what the ending says): throughput, TTFT, TPOT over the load; the spread of ITL.

    Raises OSError where the file cannot be written. Needs matplotlib: ask can_plot() first.
    """
    # Loaded here: it takes half a second, which runs without a plot should not pay.
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(11, 7.5), layout="constrained"
    )
    throughput, ttft, tpot, itl = figure.subplots(2, 2).flat
    labels = [_label(s) for s in summaries]
    places = range(len(summaries))
    throughput.plot(places, [s.output_throughput for s in summaries], "o-", label="output")
    throughput.plot(places, [s.total_throughput for s in summaries], "s--", label="total")
    throughput.set_title("tokens per second")
    for axes, title in ((ttft, "TTFT (ms)"), (tpot, "TPOT (ms)")):
        spreads = [s.ttft_ms if axes is ttft else s.tpot_ms for s in summaries]
        axes.plot(places, [each.p50 for each in spreads], "o-", label="p50")
        axes.plot(places, [each.p90 for each in spreads], "s--", label="p90")
        axes.plot(places, [each.p99 for each in spreads], "^:", label="p99")
        axes.set_title(title)
    for axes in (throughput, ttft, tpot):
        axes.set_xticks(list(places), labels)
        axes.set_ylim(bottom=0)
    for label, each in zip(labels, details, strict=True):
        itls = np.sort(each.itls)
        itl.plot(itls, np.arange(1, len(itls) + 1) / max(len(itls), 1), label=label)
    widest = max((summary.itl_ms.p99 for summary in summaries), default=0.0)
    itl.set_xlim(0, 1.5 * widest or None)
    itl.set_title("ITL: share of gaps below (ms)")
    for axes in (throughput, ttft, tpot, itl):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def _label(summary: Summary) -> str:
    streams = f"{summary.max_concurrency} streams" if summary.max_concurrency else ""
    rate = f"{summary.request_rate:g}/s" if summary.request_rate != float("inf") else ""
    return " ".join(part for part in (rate, streams) if part) or "all at once"
