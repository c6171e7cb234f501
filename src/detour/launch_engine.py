"""The engine process: the composition root of all behind the channel, and what loads torch.

Started by the front with its settings on standard input; ends with the front, however that ends.
"""

import ctypes
import logging
import os
import shutil
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from detour import logs
from detour.config.options import Config
from detour.config.start import unpack_start
from detour.engine.channel import EngineChannel, Failed
from detour.engine.loop import EngineLoop
from detour.engine.scheduler import Scheduler, SchedulerSettings
from detour.engine.supervisor import REFUSED_TO_START
from detour.errors import DetourError
from detour.worker.build import choose_device
from detour.worker.cuda_graphs import decode_sizes
from detour.worker.executors import LocalExecutor
from detour.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl


@dataclass(frozen=True)
class Chosen:
    """What is taken for the device where the flags leave it open."""

    sequences: int
    chunk: int  # tokens
    memory: float  # share


# On a CPU a step of 512 tokens of a small model takes about as long as a reader notices.
ON_CPU = Chosen(sequences=64, chunk=512, memory=0.5)
ON_GPU = Chosen(sequences=256, chunk=8192, memory=0.88)


def main() -> int:
    # Ctrl-C, systemd and container runtimes signal all of us; the front alone decides how we end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    start = unpack_start(read_line(sys.stdin.fileno()))
    folder = Path(start.to_engine.removeprefix("ipc://")).parent
    threading.Thread(target=end_with_input, args=(folder,), daemon=True).start()
    logs.set_up(start.config.log_level, "engine")
    channel = EngineChannel(start.to_engine, start.to_front)
    try:
        executor, scheduler = build(start.config, Path(start.model_path), start.seed)
    except Exception as error:  # libraries raise what they like; the front must hear of it
        if isinstance(error, DetourError):
            channel.send(Failed(error.message))
        else:
            log.exception("the engine could not start")
            lines = str(error).strip().splitlines() or [type(error).__name__]
            told = lines[-1].strip(" .")  # compilers quote the source first, then say what is wrong
            channel.send(Failed(f"The engine could not start: {told}."))
        channel.close()
        return REFUSED_TO_START
    end_with_parent()
    try:
        EngineLoop(scheduler, executor, channel, executor.facts).run()
    finally:
        executor.close()
        channel.close()
    return 0


def build(config: Config, model: Path, seed: int) -> tuple[LocalExecutor, Scheduler]:
    """The engine's two halves. Raises CheckpointError and ConfigError.

    model: a folder or .gguf file; seed: of dummy weights.
    """
    executor = LocalExecutor(worker_settings(config, model, seed))
    settings = SchedulerSettings(
        chunk=config.chunked_prefill_size or chosen_for(config).chunk,
        max_prefill_tokens=config.max_prefill_tokens,
        policy="lpm" if config.schedule_policy == "lpm" else "fcfs",
        share_prefixes=not config.disable_radix_cache,
        conservativeness=config.schedule_conservativeness,
    )
    return executor, Scheduler(executor.geometry, settings)


def chosen_for(config: Config) -> Chosen:
    return ON_GPU if choose_device(config.device).is_cuda else ON_CPU


def worker_settings(
    config: Config, model: Path, seed: int, chosen: Chosen | None = None
) -> WorkerSettings:
    """chosen: for a device that is not this machine's."""
    chosen = chosen or chosen_for(config)
    slots = config.max_running_requests or chosen.sequences
    chunk = config.chunked_prefill_size or chosen.chunk
    most = min(config.cuda_graph_max_bs or slots, slots)
    graphs = config.cuda_graph_backend_decode == "full" and not config.disable_cuda_graph
    return WorkerSettings(
        model=model,
        device=config.device,
        dtype=config.dtype,
        kv_dtype=config.kv_cache_dtype,
        load_format=config.load_format,
        quantization=config.quantization,
        overrides=config.model_overrides,
        context_length=config.context_length,
        page_size=config.page_size,
        max_slots=slots,
        # Prompts may fill the chunk while every sequence decodes.
        max_step_tokens=slots + (chunk if chunk > 0 else config.max_prefill_tokens),
        max_total_tokens=config.max_total_tokens,
        memory_fraction=config.mem_fraction_static or chosen.memory,
        threads=config.threads,
        backends=config.wishes(),
        strict_backends=config.strict_backends,
        seed=seed,
        graph_sizes=decode_sizes(most, config.cuda_graph_bs) if graphs else (),
    )


def end_with_parent() -> None:
    """Linux ends this process when the front dies, even while it is deep in a kernel.

    Called when the engine is ready: until then end_with_input leaves no file behind.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def read_line(descriptor: int) -> bytes:
    """Up to a line's end, unbuffered: what follows is for end_with_input."""
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = os.read(descriptor, 1 << 16)
        if not piece:
            break
        line += piece
    return bytes(line)


def end_with_input(folder: Path) -> None:
    """The front holds our standard input open; its end means that the front is gone.

    folder: of the channel's files, which the front would have removed.
    """
    while os.read(sys.stdin.fileno(), 1 << 16):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    # Nothing is left to save, and taking torch's libraries down in order takes a second.
    os._exit(status)
