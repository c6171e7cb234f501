"""How a server under measurement is started on this machine, and ended: ours and the peers."""

import contextlib
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

PEERS_PORT = 18480


@dataclass(frozen=True)
class Server:
    name: str
    command: tuple[str, ...]
    port: int = PEERS_PORT
    start_seconds: float = 900.0  # vLLM compiles its model at the first start


def llama(binary: Path, gguf: Path, streams: int, context: int, threads: int) -> Server:
    """llama-server of llama.cpp; `streams` slots share the context it is given."""
    return Server(
        f"llama-server {gguf.stem.rpartition('.')[2] or gguf.stem}",
        (
            "env",
            f"LD_LIBRARY_PATH={binary.parent}",
            str(binary),
            *("-m", str(gguf)),
            *("--port", str(PEERS_PORT)),
            *("-np", str(streams)),
            *("-c", str(streams * context)),
            *("-t", str(threads)),
            *("-tb", str(threads)),
            "--no-webui",
        ),
    )


def vllm(binary: Path, model: Path, dtype: str, context: int, threads: int) -> Server:
    return Server(
        f"vllm-cpu {dtype}",
        (
            "env",
            "VLLM_CPU_KVCACHE_SPACE=2",
            f"VLLM_CPU_OMP_THREADS_BIND=0-{threads - 1}",
            "HF_HUB_OFFLINE=1",
            "VLLM_NO_USAGE_STATS=1",
            *(str(binary), "serve", str(model)),
            *("--port", str(PEERS_PORT)),
            *("--dtype", dtype),
            *("--max-model-len", str(context)),
            *("--max-num-seqs", "64"),
        ),
    )


def detour(
    python: Path, model: str, flags: list[str], context: int, port: int = PEERS_PORT
) -> Server:
    label = " ".join(["detour", *flags])
    source = Path(__file__).parents[1] / "src"
    command = (
        *("env", f"PYTHONPATH={source}"),
        *(str(python), "-m", "detour", "serve"),
        *("--model", model),
        *("--port", str(port)),
        *("--context-length", str(context)),
        *flags,
    )
    return Server(label, command, port)


class Running:
    """`with Running(server, log)`: up and healthy inside, gone with its whole group after."""

    def __init__(self, server: Server, log: Path) -> None:
        self._server = server
        self._log = log
        self.seconds_to_start = 0.0
        self.url = f"http://127.0.0.1:{server.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> "Running":
        if healthy(self._server.port):
            raise RuntimeError(
                f"something answers on port {self._server.port} already; end it first"
            )
        began = time.monotonic()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._server.command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        while time.monotonic() - began < self._server.start_seconds:
            if self._process.poll() is not None:
                raise RuntimeError(f"{self._server.name} ended at its start; see {self._log}")
            if healthy(self._server.port):
                self.seconds_to_start = time.monotonic() - began
                return self
            time.sleep(0.5)
        self.__exit__()
        raise RuntimeError(f"{self._server.name} was not ready in time; see {self._log}")

    def __exit__(self, *_: object) -> None:
        try:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(30)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass
        with contextlib.suppress(ProcessLookupError):  # what it left behind
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False
