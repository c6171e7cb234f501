"""What a measured load comes to, on loads whose figures can be worked out by hand."""

import json
from array import array

import numpy as np
import pytest

from detour.bench.load import Load, Measured, Outcome
from detour.bench.plot import can_plot, plot
from detour.bench.report import overview, record, spread, summarise, table

INF = float("inf")
LOAD = Load(INF, 2)


def outcome(started, times, tokens=-1, counts=(), error="", prompt=10) -> Outcome:
    return Outcome(
        prompt_tokens=prompt,
        output_tokens=tokens,
        cached_tokens=2,
        started=started,
        ended=times[-1] if times else started,
        times=array("d", times),
        counts=array("q", counts or [-1] * len(times)),
        error=error,
    )


def summary_of(outcomes, goodput=None, stream=True, ended=10.0):
    return summarise(Measured(outcomes, 0.0, ended, 0.5), LOAD, goodput or {}, stream)


def test_percentiles_are_interpolated():
    values = np.arange(1, 101, dtype=float)
    found = spread(values)
    assert (found.mean, found.p50, found.max) == (50.5, 50.5, 100.0)
    assert found.p90 == pytest.approx(90.1)
    assert found.p99 == pytest.approx(99.01)
    assert found.std == pytest.approx(values.std())
    assert spread(np.array([7.0])).p99 == 7.0
    assert spread(np.zeros(0)).p99 == 0.0


def test_times_of_one_request():
    # Sent at 1 s; text at 1.5, 1.6 and 1.9 s.
    summary, details = summary_of([outcome(1.0, [1.5, 1.6, 1.9], tokens=3)])
    assert summary.ttft_ms.mean == pytest.approx(500)
    assert summary.e2e_ms.mean == pytest.approx(900)
    assert summary.tpot_ms.mean == pytest.approx(200)
    assert details.itls == pytest.approx([100, 300])
    assert summary.output_throughput == pytest.approx(0.3)
    assert summary.total_throughput == pytest.approx(1.3)
    assert summary.request_throughput == pytest.approx(0.1)
    assert summary.client_cpu_us_per_piece == pytest.approx(0.5 / 3 * 1e6)


def test_a_piece_of_several_tokens_shares_its_gap():
    _, details = summary_of([outcome(0.0, [1.0, 1.4], tokens=5, counts=[1, 5])])
    assert details.itls == pytest.approx([100] * 4)


def test_tokens_are_the_servers_count_or_else_the_pieces():
    told, _ = summary_of([outcome(0.0, [1.0, 2.0], tokens=7)])
    assert (told.total_output_tokens, told.tokens_counted_by) == (7, "server")
    untold, _ = summary_of([outcome(0.0, [1.0, 2.0])])
    assert (untold.total_output_tokens, untold.tokens_counted_by) == (2, "pieces")
    assert "pieces of text" in table(untold, "openai", {})


def test_one_token_has_no_tpot_and_no_gap():
    summary, details = summary_of([outcome(0.0, [1.0], tokens=1)])
    assert summary.tpot_ms.max == 0.0 and details.itls == []


def test_failures_count_apart():
    summary, details = summary_of(
        [outcome(0.0, [1.0], tokens=1)]
        + [outcome(0.0, [], error="HTTP 503: full")] * 2
        + [outcome(0.0, [0.5], tokens=1, error="cut")]
    )
    assert (summary.completed, summary.failed, summary.total_output_tokens) == (1, 3, 1)
    assert summary.failures == {"HTTP 503: full": 2, "cut": 1}
    assert details.errors == ["HTTP 503: full", "HTTP 503: full", "cut"]
    assert "failed x2: HTTP 503: full" in table(summary, "openai", {})


def test_nothing_succeeded():
    summary, details = summary_of([outcome(0.0, [], error="no")])
    assert (summary.completed, summary.output_throughput, summary.peak_output_throughput) == (
        0,
        0,
        0,
    )
    assert "failed x1: no" in table(summary, "openai", {})
    assert json.loads(record(summary, details, {}))["completed"] == 0


def test_peaks():
    # Open: a over [0, 3], b over [1, 2.4], c from 3 on, as a ends.
    summary, _ = summary_of(
        [
            outcome(0.0, [0.5, 3.0], tokens=2),
            outcome(1.0, [1.6, 1.8, 2.2, 2.4], tokens=4),
            outcome(3.0, [3.5, 4.0], tokens=2),
        ]
    )
    assert summary.peak_concurrency == 2
    assert summary.peak_output_throughput == 4.0  # from 1.6 s on, across a whole second's edge
    assert summary.concurrency == pytest.approx(0.54)  # 3 + 1.4 + 1 s of requests in 10 s


def test_goodput_counts_requests_within_every_limit():
    outcomes = [outcome(0.0, [0.1, 0.2], tokens=2), outcome(0.0, [0.1, 0.9], tokens=2)]
    summary, _ = summary_of(outcomes, {"ttft": 150.0, "tpot": 200.0})
    assert summary.good_requests == 1
    assert "1 of 2" in table(summary, "openai", {"ttft": 150.0, "tpot": 200.0})


def test_without_streaming_ttft_is_the_whole_time():
    summary, _ = summary_of([outcome(0.0, [2.0], tokens=3)], stream=False)
    assert summary.ttft_ms.p50 == summary.e2e_ms.p50 == pytest.approx(2000)


def test_the_record_has_the_fields_names():
    summary, details = summary_of([outcome(0.0, [1.0, 2.0], tokens=2)])
    found = json.loads(record(summary, None, {"tag": "t"}))
    assert found["tag"] == "t" and found["request_rate"] == "inf"
    assert found["median_ttft_ms"] == pytest.approx(1000)
    assert found["p99_itl_ms"] == pytest.approx(1000)
    assert "ttfts" not in found
    assert json.loads(record(summary, details, {}))["ttfts"] == pytest.approx([1000])


def test_overview_has_a_line_a_level():
    summary, _ = summary_of([outcome(0.0, [1.0, 2.0], tokens=2)])
    assert len(overview([summary, summary]).splitlines()) == 3


def test_plot(tmp_path):
    assert can_plot()
    summary, details = summary_of([outcome(0.0, [1.0, 2.0], tokens=2)])
    plot([summary, summary], [details, details], tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
