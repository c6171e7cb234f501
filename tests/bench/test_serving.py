"""`detour bench serve` as a person runs it: flags in, table, JSON, plot and exit status out."""

import asyncio
import json
import threading

import pytest
from scripted_server import ScriptedServer, answer, whole

from detour.bench.serving import main


@pytest.fixture
def serve():
    """serve(script) -> a ScriptedServer on its own thread; `main` brings its own event loop."""
    stops = []

    def start(script=answer) -> ScriptedServer:
        up, stop = threading.Event(), None
        server = ScriptedServer(script)

        async def run() -> None:
            nonlocal stop
            stop = asyncio.Event()
            loop = asyncio.get_running_loop()
            stops.append(lambda: (loop.call_soon_threadsafe(stop.set), thread.join()))
            async with server:
                up.set()
                await stop.wait()

        thread = threading.Thread(target=lambda: asyncio.run(run()))
        thread.start()
        assert up.wait(10)
        return server

    yield start
    for stop in stops:
        stop()


def run(server, *flags) -> int:
    return main(["--base-url", server.url, "--disable-tqdm", *map(str, flags)])


SMALL = ("--random-input-len", 6, "--random-output-len", 4)


def test_levels_tables_json_and_plot(serve, tmp_path, capsys):
    server, out, png = serve(), tmp_path / "o.jsonl", tmp_path / "p.png"
    flags = ("--max-concurrency", "1,4", "--num-prompts", 8, "--tag", "t", "--flush-cache")
    assert run(server, *SMALL, *flags, "--output-file", out, "--plot", png) == 0
    printed = capsys.readouterr().out
    assert printed.count("Serving benchmark") == 2
    for name in ("TTFT", "TPOT", "ITL", "E2E", "Peak concurrent requests:", "p99"):
        assert name in printed
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["max_concurrency"] for line in lines] == [1, 4]
    assert [line["peak_concurrency"] for line in lines] == [1, 4]
    for line in lines:
        assert line["model"] == "scripted" and line["tag"] == "t"
        assert line["total_input_tokens"] == 8 * 6
        assert line["total_output_tokens"] == 8 * 4
    assert png.read_bytes().startswith(b"\x89PNG")
    asked = [a for a in server.asked if a.path == "/v1/completions"]
    assert len(asked) == 2 * (8 + 1)  # a warm-up each
    prompts = [tuple(a.json["prompt"]) for a in asked]
    assert len(set(prompts)) == len(prompts)  # no level finds another's prompts in the cache
    assert all(100 <= token < 900 for prompt in prompts for token in prompt)  # n_vocab 1000


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai-chat", "vllm"])
@pytest.mark.parametrize("stream", [True, False])
def test_backends(serve, capsys, backend, stream):
    server = serve()
    flags = () if stream else ("--disable-stream",)
    assert run(server, *SMALL, "--backend", backend, "--num-prompts", 3, *flags) == 0
    assert "Total generated tokens:" in capsys.readouterr().out


def test_open_loop(serve, capsys):
    assert run(serve(), *SMALL, "--request-rate", "200,inf", "--num-prompts", 5) == 0
    assert capsys.readouterr().out.count("Successful requests:") == 2


def test_shared_prefixes(serve):
    server = serve()
    sizes = ("--gsp-num-groups", 2, "--gsp-prompts-per-group", 3, "--gsp-system-prompt-len", 8)
    flags = ("--gsp-question-len", 2, "--gsp-output-len", 2, "--warmup-requests", 0)
    assert run(server, "--dataset-name", "generated-shared-prefix", *sizes, *flags) == 0
    prompts = [a.json["prompt"] for a in server.asked]
    assert len(prompts) == 6 and len({tuple(p[:8]) for p in prompts}) == 2


def test_all_failed_is_told_and_is_exit_status_1(serve, capsys):
    async def broken(asked, write):
        if asked.method == "GET":
            await answer(asked, write)
        else:
            await write(whole(500, {"error": {"message": "The engine is gone."}}))

    assert run(serve(broken), *SMALL, "--num-prompts", 4) == 1
    assert "failed x4: HTTP 500: The engine is gone." in capsys.readouterr().out


def test_some_failed_is_exit_status_0(serve, capsys):
    count = 0

    async def sometimes(asked, write):
        nonlocal count
        count += asked.method == "POST"
        if asked.method == "POST" and count % 2:
            await write(whole(503, {"message": "Full."}))
        else:
            await answer(asked, write)

    assert run(serve(sometimes), *SMALL, "--num-prompts", 4, "--warmup-requests", 0) == 0
    printed = capsys.readouterr().out
    assert "failed x2: HTTP 503: Full." in printed


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--base-url", "http://127.0.0.1:9", "--ready-check-timeout-sec", "0"], "is it running"),
        (["--base-url", "nonsense://x"], "is not a server's URL"),
        (["--header", "noseparator"], "should read Name=value"),
        (["--goodput", "speed:1"], "should read ttft:MS"),
    ],
)
def test_flags_that_do_not_fit_get_a_sentence(flags, says, capsys):
    assert main(flags) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert says in error and "Traceback" not in error


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--dataset-name", "sharegpt"], "needs --dataset-path"),
        (["--dataset-name", "custom", "--dataset-path", "/absent"], "cannot be read"),
        (["--extra-request-body", "{"], "not a JSON object"),
        (["--extra-request-body", "[1]"], "not a JSON object"),
        (["--output-file", "/absent/x", "--num-prompts", "1"], "--output-file cannot be written"),
        (["--plot", "/absent/x.png", "--num-prompts", "1"], "--plot cannot be written"),
        (["--plot", "x.nonsense", "--num-prompts", "1"], "--plot cannot be written"),
        (["--tokenizer", "/absent", "--num-prompts", "1"], "/absent"),
    ],
)
def test_what_cannot_be_done_gets_a_sentence(serve, flags, says, capsys):
    assert run(serve(), *SMALL, *flags) == 2
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "flags",
    [
        ["--num-prompts", "-1"],
        ["--random-input-len", "0"],
        ["--random-range-ratio", "2"],
        ["--request-rate", "0"],
        ["--max-concurrency", "x"],
        ["--backend", "unknown"],
        ["--unknown"],
    ],
)
def test_values_out_of_range_are_refused(flags):
    with pytest.raises(SystemExit) as caught:
        main(flags)
    assert caught.value.code == 2
