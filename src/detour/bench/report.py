"""What a measured load comes to: spreads, rates, peaks, failures; as a table and as JSON.

Meanings are the field's. TTFT: sent to first text. E2E: sent to last text. TPOT: (E2E - TTFT) /
(output tokens - 1). ITL: the gap between two pieces of text, shared out over the tokens of the
later one where the server says how many those are. A failed request counts in `failed` alone.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from detour.bench.load import Load, Measured, Outcome

Floats = NDArray[np.float64]


class Spread(msgspec.Struct, frozen=True):
    """Of a set of milliseconds; zeros where the set is empty."""

    mean: float
    std: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def spread(values_ms: Floats) -> Spread:
    if not len(values_ms):
        return Spread(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    p50, p90, p95, p99 = np.percentile(values_ms, (50, 90, 95, 99)).tolist()
    return Spread(
        float(values_ms.mean()), float(values_ms.std()), p50, p90, p95, p99, float(values_ms.max())
    )


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One level of load. Times in the names' units, rates per second of `duration`."""

    request_rate: float  # inf = all at once
    max_concurrency: int  # 0 = no limit
    duration: float  # seconds, first sent to last ended
    completed: int
    failed: int
    failures: dict[str, int]  # reason -> how many
    total_input_tokens: int
    total_output_tokens: int
    total_cached_tokens: int
    tokens_counted_by: str  # "server", or "pieces" where a server tells no usage
    request_throughput: float
    input_throughput: float
    output_throughput: float
    total_throughput: float
    peak_output_throughput: float  # tokens in the best second
    peak_concurrency: int
    concurrency: float  # mean number open
    ttft_ms: Spread
    tpot_ms: Spread
    itl_ms: Spread
    e2e_ms: Spread
    good_requests: int  # within every limit of --goodput; all completed where there is none
    client_cpu_us_per_piece: float


class Details(msgspec.Struct, frozen=True):
    """Per completed request, for plots and --output-details. All in ms but the token counts."""

    ttfts: list[float]
    tpots: list[float]
    e2es: list[float]
    itls: list[float]  # of all requests together
    input_lens: list[int]
    output_lens: list[int]
    errors: list[str]


def summarise(
    measured: Measured, load: Load, goodput: dict[str, float], stream: bool
) -> tuple[Summary, Details]:
    """`goodput` limits "ttft", "tpot", "e2e" in ms."""
    good = [outcome for outcome in measured.outcomes if not outcome.error]
    bad = [outcome for outcome in measured.outcomes if outcome.error]
    outputs = np.array([_output_tokens(outcome) for outcome in good], np.float64)
    ttfts, e2es = _first_and_last_ms(good, stream)
    several = outputs > 1
    tpots = np.zeros(len(good))
    tpots[several] = (e2es[several] - ttfts[several]) / (outputs[several] - 1)
    gaps = [_gaps_ms(outcome) for outcome in good]
    itls = np.concatenate(gaps) if gaps else np.zeros(0)
    duration = max(measured.ended - measured.started, 1e-9)
    inputs = sum(max(outcome.prompt_tokens, 0) for outcome in good)
    total = int(outputs.sum())
    pieces = sum(len(outcome.times) for outcome in measured.outcomes)
    told = all(outcome.output_tokens >= 0 for outcome in good)
    summary = Summary(
        request_rate=load.rate,
        max_concurrency=load.concurrency,
        duration=duration,
        completed=len(good),
        failed=len(bad),
        failures=dict(Counter(outcome.error for outcome in bad).most_common()),
        total_input_tokens=inputs,
        total_output_tokens=total,
        total_cached_tokens=sum(max(outcome.cached_tokens, 0) for outcome in good),
        tokens_counted_by="server" if told else "pieces",
        request_throughput=len(good) / duration,
        input_throughput=inputs / duration,
        output_throughput=total / duration,
        total_throughput=(inputs + total) / duration,
        peak_output_throughput=_peak_tokens_in_a_second(good),
        peak_concurrency=_peak_open(measured.outcomes),
        concurrency=sum(o.ended - o.started for o in measured.outcomes) / duration,
        ttft_ms=spread(ttfts),
        tpot_ms=spread(tpots[several]),
        itl_ms=spread(itls),
        e2e_ms=spread(e2es),
        good_requests=_within(goodput, {"ttft": ttfts, "tpot": tpots, "e2e": e2es}, len(good)),
        client_cpu_us_per_piece=measured.client_cpu_seconds / max(pieces, 1) * 1e6,
    )
    details = Details(
        ttfts.tolist(),
        tpots.tolist(),
        e2es.tolist(),
        itls.tolist(),
        [outcome.prompt_tokens for outcome in good],
        [int(n) for n in outputs],
        [outcome.error for outcome in bad],
    )
    return summary, details


def _output_tokens(outcome: Outcome) -> int:
    return outcome.output_tokens if outcome.output_tokens >= 0 else len(outcome.times)


def _first_and_last_ms(good: Sequence[Outcome], stream: bool) -> tuple[Floats, Floats]:
    """A reply without text (or not streamed) has its end for both."""
    first = [(o.times[0] if stream and o.times else o.ended) - o.started for o in good]
    last = [(o.times[-1] if stream and o.times else o.ended) - o.started for o in good]
    return np.array(first) * 1e3, np.array(last) * 1e3


def _gaps_ms(outcome: Outcome) -> Floats:
    gaps = np.diff(np.asarray(outcome.times)) * 1e3
    counts = np.asarray(outcome.counts)
    if len(gaps) and counts.min() >= 0:
        new = np.maximum(np.diff(counts), 1)
        gaps = np.repeat(gaps / new, new)
    return gaps


def _piece_tokens(outcome: Outcome) -> Floats:
    """Tokens of each piece [pieces]: as told, else the request's tokens shared out evenly."""
    counts = np.asarray(outcome.counts)
    if counts.min() >= 0:
        return np.diff(counts, prepend=0).astype(np.float64)
    return np.full(len(counts), _output_tokens(outcome) / len(counts))


def _peak_tokens_in_a_second(good: Sequence[Outcome]) -> float:
    """The most tokens that came within any one second."""
    with_text = [outcome for outcome in good if outcome.times]
    if not with_text:
        return 0.0
    times = np.concatenate([np.asarray(outcome.times) for outcome in with_text])
    tokens = np.concatenate([_piece_tokens(outcome) for outcome in with_text])
    order = np.argsort(times)
    times, before = times[order], np.concatenate([[0.0], np.cumsum(tokens[order])])
    ends = np.searchsorted(times, times + 1.0)
    return float((before[ends] - before[:-1]).max())


def _peak_open(outcomes: Sequence[Outcome]) -> int:
    """Most requests open at one moment; one that ends as another starts is not counted with it."""
    moments = [(o.started, 1) for o in outcomes] + [(o.ended, -1) for o in outcomes]
    open_now = np.cumsum([change for _, change in sorted(moments)])
    return int(open_now.max(initial=0))


def _within(limits: dict[str, float], found: dict[str, Floats], count: int) -> int:
    good = np.ones(count, np.bool_)
    for name, limit in limits.items():
        good &= found[name] <= limit
    return int(good.sum())


def table(summary: Summary, backend: str, goodput: dict[str, float]) -> str:
    """The field's block for one level."""
    s = summary
    rows: list[tuple[str, str]] = [
        ("Backend:", backend),
        ("Traffic request rate:", f"{s.request_rate:g}"),
        ("Max request concurrency:", str(s.max_concurrency or "no limit")),
        ("Successful requests:", str(s.completed)),
        ("Failed requests:", str(s.failed)),
        ("Benchmark duration (s):", f"{s.duration:.2f}"),
        ("Total input tokens:", str(s.total_input_tokens)),
        ("Total cached input tokens:", str(s.total_cached_tokens)),
        ("Total generated tokens:", str(s.total_output_tokens)),
        ("Request throughput (req/s):", f"{s.request_throughput:.2f}"),
        ("Input token throughput (tok/s):", f"{s.input_throughput:.2f}"),
        ("Output token throughput (tok/s):", f"{s.output_throughput:.2f}"),
        ("Peak output token throughput (tok/s):", f"{s.peak_output_throughput:.2f}"),
        ("Total token throughput (tok/s):", f"{s.total_throughput:.2f}"),
        ("Peak concurrent requests:", str(s.peak_concurrency)),
        ("Concurrency:", f"{s.concurrency:.2f}"),
        ("Client CPU per piece (us):", f"{s.client_cpu_us_per_piece:.1f}"),
    ]
    if goodput:
        limits = " ".join(f"{name}:{limit:g}" for name, limit in goodput.items())
        rows.append((f"Requests within {limits} ms:", f"{s.good_requests} of {s.completed}"))
    if s.tokens_counted_by == "pieces":
        rows.append(("Generated tokens counted by:", "pieces of text (no usage told)"))
    lines = [f"{' Serving benchmark ':=^72}"]
    lines += [f"{name:<42}{value:>30}" for name, value in rows]
    heads = ("mean", "p50", "p90", "p95", "p99", "max")
    lines.append(f"{'(ms)':<8}" + "".join(f"{head:>10}" for head in heads))
    spreads = {"TTFT": s.ttft_ms, "TPOT": s.tpot_ms, "ITL": s.itl_ms, "E2E": s.e2e_ms}
    for name, each in spreads.items():
        values = (each.mean, each.p50, each.p90, each.p95, each.p99, each.max)
        lines.append(f"{name:<8}" + "".join(f"{value:>10.2f}" for value in values))
    for reason, count in s.failures.items():
        lines.append(f"failed x{count}: {reason}")
    return "\n".join([*lines, "=" * 72])


def overview(summaries: Sequence[Summary]) -> str:
    """One line a level."""
    heads = ("rate", "streams", "ok", "failed", "out tok/s", "peak", "in tok/s", "TTFT p50", "p99",
             "TPOT p50", "p99", "E2E p50")  # fmt: skip
    lines = ["".join(f"{head:>10}" for head in heads)]
    for s in summaries:
        cells = (
            f"{s.request_rate:g}",
            str(s.max_concurrency or "-"),
            str(s.completed),
            str(s.failed),
            *(f"{value:.1f}" for value in (s.output_throughput, s.peak_output_throughput,
              s.input_throughput, s.ttft_ms.p50, s.ttft_ms.p99, s.tpot_ms.p50, s.tpot_ms.p99,
              s.e2e_ms.p50)),
        )  # fmt: skip
        lines.append("".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)


def record(summary: Summary, details: Details | None, about: dict[str, object]) -> bytes:
    """One JSON line: spreads flattened to the field's names (mean_ttft_ms, p99_itl_ms, ...)."""
    flat: dict[str, object] = dict(about)
    for name, value in msgspec.structs.asdict(summary).items():
        if isinstance(value, Spread):
            for kind, number in msgspec.structs.asdict(value).items():
                flat[f"{'median' if kind == 'p50' else kind}_{name}"] = number
        else:
            flat[name] = str(value) if value == float("inf") else value
    if details is not None:
        flat |= msgspec.structs.asdict(details)
    return msgspec.json.encode(flat)
