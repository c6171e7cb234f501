"""The judgements of the scripts in bench/: a verdict that cannot fail would hold nothing."""

import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


def test_host_holds_each_figure_to_its_bar(script):
    host, row = script("host"), script("row").Row
    under, over = row("1 a", 1.0, "ms", "x", 1.0), row("10 b", 1.1, "ms", "", 1.0)
    assert host.holds(under) and not host.holds(over)
    assert host.holds(row("11 c", 30.0, "tok/s", "", 25.0))
    assert not host.holds(row("11 c", 20.0, "tok/s", "", 25.0))
    assert (host.item(under), host.item(over)) == (1, 10)
    _, first, second = host.table([under, over]).splitlines()
    assert first.endswith("ok") and second.endswith("MISSED")


def test_peers_compares_medians_over_rounds(script):
    peers = script("peers")

    def line(rate):
        return dict.fromkeys(peers.FIGURES.values(), rate)

    found = {
        "ours": {8: [line(10.0), line(30.0), line(20.0)]},
        "peer": {8: [line(40.0)]},
        "x": {8: []},
    }
    lines = peers.report(found, "ours").splitlines()
    assert lines[2].split()[1] == "20.0" and lines[2].split()[-2:] == ["10-30", "1.00"]
    assert lines[3].split()[-1] == "0.50"
    assert "no figure" in lines[4]


def test_soak_tells_growth_from_noise(script, capsys):
    soak = script("soak")
    noise = [0.0, 1.5, -1.0, 0.5] * 10
    flat = [(n * 500, {"engine": 300.0 + noise[n]}) for n in range(40)]
    grows = [(n * 500, {"engine": 300.0 + n}) for n in range(40)]
    assert soak.verdicts(flat, 8.0)
    assert not soak.verdicts(grows, 8.0)
    assert "GROWING" in capsys.readouterr().out


def test_exactness_finds_the_first_difference(script):
    exactness = script("exactness")
    assert exactness.differences([[1, 2, 3], [4]], [[1, 2, 3], [4]]) == []
    (text,) = exactness.differences([[1, 2, 3]], [[1, 9, 3]])
    assert "new token 1 [2] became [9]" in text
    (text,) = exactness.differences([[1], [1, 2, 3]], [[1], [1, 2]])
    assert "request 1 (sampled): at new token 2 [3] became []" in text


def test_exactness_covers_every_combination(script):
    exactness = script("exactness")
    every = exactness.combinations(False)
    assert len(set(every)) == 36
    flags = [" ".join(combination.flags) for combination in every]
    assert sum("--disable-radix-cache" in text for text in flags) == 18
    assert sum("--max-total-tokens" in text for text in flags) == 18
    assert sum("--chunked-prefill-size -1" in text for text in flags) == 12
    assert sum("--page-size 64" in text for text in flags) == 12


def test_pocket_names_each_bar_that_is_missed(script):
    pocket = script("pocket")
    good = {"copying": 90.0, "recall": 99.0, "sums": 80.0, "calls": 95.0}
    assert pocket.verdict({pocket.BASE: good, pocket.QUANTISED: {**good, "recall": 97.0}}) == []
    missed = pocket.verdict({pocket.BASE: {**good, "calls": 94.0}, pocket.QUANTISED: good})
    assert missed == ["calls is right in 94.0 %, not 95 %"]
    missed = pocket.verdict({pocket.BASE: good, pocket.QUANTISED: {**good, "sums": 77.0}})
    assert missed == ["NVFP4 with an fp8 cache loses 3.0 points of sums"]
