"""The host path's benchmarks (items 1 to 13 of the CPU set): our figure, the anchor, the bar.

    python bench/host.py [--only 1,4,10] [--json FILE]

Each part runs in a process of its own, on one compute thread, and says its rows; a part that fails
is told and does not stop the others. Exit status 1 when a figure misses its bar or a part failed.
Figures are CPU time, medians, unless a row's name says otherwise. A busy machine raises them too
(other work cools the caches), so judge a miss on a quiet one.
"""

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path

from row import Row

PARTS = {  # file -> the items it measures
    "host_engine": (1, 2, 3, 4, 5, 6, 7),
    "host_front": (8, 10, 12),
    "host_text": (9,),
    "host_sampling": (13,),
    "host_full": (11,),
}
AT_LEAST = ("tok/s", "req/s")  # units in which more is better; else the bar is the most allowed


def item(row: Row) -> int:
    """Names begin with the item's number in the set."""
    return int(row.name.split()[0].rstrip(".:"))


def holds(row: Row) -> bool:
    return row.value >= row.bar if row.unit in AT_LEAST else row.value <= row.bar


def measure(part: str) -> list[Row]:
    """Raises RuntimeError with the part's last words where it fails."""
    settings = ["env", "OMP_NUM_THREADS=1", "TOKENIZERS_PARALLELISM=false"]
    command = [*settings, sys.executable, __file__, "--part", part]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or "no word").splitlines()[-1])
    return [Row(*fields) for fields in json.loads(done.stdout.splitlines()[-1])]


def table(rows: list[Row]) -> str:
    cells = [("", "value", "unit", "anchor", "bar", "")]
    for row in rows:
        relation = ">=" if row.unit in AT_LEAST else "<="
        verdict = "ok" if holds(row) else "MISSED"
        bar = f"{relation} {row.bar:g}"
        cells.append((row.name, f"{row.value:.3g}", row.unit, row.anchor, bar, verdict))
    widths = [max(len(line[column]) for line in cells) for column in range(6)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in (1, 4) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", default="", help="item numbers, like 1,4,10")
    parser.add_argument("--json", default="", help="write the rows here too")
    parser.add_argument("--part", choices=PARTS, help="run one file here, print its rows as JSON")
    args = parser.parse_args()
    if args.part:
        print(json.dumps(importlib.import_module(args.part).rows()))
        return 0
    wanted = {int(number) for number in args.only.split(",") if number}
    rows: list[Row] = []
    failed = []
    for part, items in PARTS.items():
        if wanted and not wanted & set(items):
            continue
        if not (Path(__file__).parent / f"{part}.py").exists():
            failed.append(f"{part}: not there")
            continue
        print(f"{part} ...", file=sys.stderr, flush=True)
        try:
            rows += [row for row in measure(part) if not wanted or item(row) in wanted]
        except RuntimeError as error:
            failed.append(f"{part}: {error}")
    rows.sort(key=item)
    print(table(rows))
    for line in failed:
        print(f"FAILED  {line}")
    if args.json:
        Path(args.json).write_text(json.dumps([row._asdict() for row in rows], indent=1))
    return 1 if failed or not all(map(holds, rows)) else 0


if __name__ == "__main__":
    sys.exit(main())
