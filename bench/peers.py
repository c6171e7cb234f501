"""Detour beside its peers: each server alone on this machine in turn, one client, medians.

    python bench/peers.py --llama-server BIN --gguf Q8.gguf --vllm BIN --vllm-model DIR

README.md here says how the peers are built. A round starts every server, warms it up, drives it
at each number of streams with `detour bench serve` (closed loop, prompts of random ids, ignore_eos)
and ends it. Rounds alternate the servers, so that a slow minute of the machine does not fall on one
of them alone. Peers that are not given are left out.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from servers import PEERS_PORT, Running, Server, detour, llama, vllm

FIGURES = {
    "out tok/s": "output_throughput",
    "TTFT ms": "median_ttft_ms",
    "TTFT p99": "p99_ttft_ms",
    "step ms": "median_tpot_ms",
    "client us": "client_cpu_us_per_piece",
}


def drive(streams: int, args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """One level with `detour bench serve`; its JSON line."""
    out = folder / "level.jsonl"
    out.unlink(missing_ok=True)
    count = max(args.waves * streams, 4)
    command = [
        *("env", f"PYTHONPATH={Path(__file__).parents[1] / 'src'}"),
        *(sys.executable, "-m", "detour.bench.serving"),
        *("--port", str(PEERS_PORT), "--backend", "openai", "--disable-tqdm"),
        *("--max-concurrency", str(streams), "--num-prompts", str(count)),
        *("--random-input-len", str(args.input_len), "--random-output-len", str(args.output_len)),
        *("--vocab-size", str(args.vocab_size), "--warmup-requests", "2"),
        *("--seed", str(streams), "--output-file", str(out)),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if not out.exists():
        raise RuntimeError(f"the client failed: {done.stderr.strip()[-500:]}")
    found: dict[str, float] = json.loads(out.read_text())
    if found["failed"]:
        raise RuntimeError(f"requests failed: {found['failures']}")
    return found


def measure(servers: list[Server], args: argparse.Namespace) -> dict[str, dict[int, list[dict]]]:
    """name -> streams -> one JSON line a round. A server that fails keeps what it has."""
    found: dict[str, dict[int, list[dict]]] = {
        server.name: {streams: [] for streams in args.streams} for server in servers
    }
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            for server in servers[number % len(servers) :] + servers[: number % len(servers)]:
                log = args.logs / f"{server.name.replace(' ', '_').replace('/', '_')}.log"
                try:
                    with Running(server, log) as running:
                        seconds = running.seconds_to_start
                        say(f"round {number + 1}: {server.name} up in {seconds:.0f} s")
                        for streams in args.streams:
                            line = drive(streams, args, Path(folder))
                            found[server.name][streams].append(line)
                            say(f"  {streams:3} streams {line['output_throughput']:8.1f} tok/s")
                except RuntimeError as error:
                    say(f"  {server.name}: {error}")
    return found


def report(found: dict[str, dict[int, list[dict]]], ours: str) -> str:
    """A block per number of streams: medians over the rounds, the range, and ours / theirs."""
    width = max(len(name) for name in found)
    lines = []
    for streams in next(iter(found.values())):
        heads = "".join(f"{name:>11}" for name in FIGURES)
        lines.append(f"\n{f'{streams} streams':<{width}}{heads}{'range':>18}{'ours/theirs':>13}")
        mine = median(found.get(ours, {}).get(streams, []), "output_throughput")
        for name, levels in found.items():
            rounds = levels[streams]
            if not rounds:
                lines.append(f"{name:<{width}}  no figure")
                continue
            values = "".join(f"{median(rounds, key):>11.1f}" for key in FIGURES.values())
            rates = sorted(line["output_throughput"] for line in rounds)
            span = f"{rates[0]:.0f}-{rates[-1]:.0f}"
            ratio = f"{mine / median(rounds, 'output_throughput'):.2f}" if mine else "-"
            lines.append(f"{name:<{width}}{values}{span:>18}{ratio:>13}")
    return "\n".join(lines)


def median(rounds: list[dict], key: str) -> float:
    return statistics.median([line[key] for line in rounds]) if rounds else 0.0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    path = {"type": Path, "default": None}
    parser.add_argument("--llama-server", **path, help="binary")
    parser.add_argument("--gguf", type=Path, nargs="*", default=[], help="one server each")
    parser.add_argument("--vllm", **path, help="the vllm command of its environment")
    parser.add_argument("--vllm-model", **path, help="folder with safetensors")
    parser.add_argument("--vllm-dtype", nargs="*", default=["bfloat16"])
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="ours")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="ours: name or path")
    parser.add_argument(
        "--detour", action="append", default=[], metavar="FLAGS", help="ours; again for a variant"
    )
    parser.add_argument("--no-detour", action="store_true")
    parser.add_argument(
        "--streams", type=lambda s: [int(n) for n in s.split(",")], default="1,8,32"
    )
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--vocab-size", type=int, default=49_152)
    parser.add_argument("--waves", type=int, default=3, help="requests = waves x streams")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of the peers")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "peers-logs")
    parser.add_argument("--json", **path, help="all lines of all rounds")
    return parser.parse_args()


def main() -> int:
    args = parse()
    args.logs.mkdir(parents=True, exist_ok=True)
    servers = []
    if not args.no_detour:
        for flags in args.detour or [""]:
            servers.append(detour(args.python, args.model, flags.split(), args.context))
    if args.vllm and args.vllm_model:
        for dtype in args.vllm_dtype:
            servers.append(vllm(args.vllm, args.vllm_model, dtype, args.context, args.threads))
    if args.llama_server:
        for gguf in args.gguf:
            most = max(args.streams)
            servers.append(llama(args.llama_server, gguf, most, args.context, args.threads))
    if not servers:
        say("No server is given.")
        return 2
    found = measure(servers, args)
    print(report(found, "" if args.no_detour else servers[0].name))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0 if all(rounds for levels in found.values() for rounds in levels.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
