"""CPU kernels in C++, compiled once on the machine that runs them.

Every `.cpp` beside this file becomes one shared library, built for this processor by the compiler
that is found and kept under the user's cache. Where there is no compiler, or the processor lacks
AVX2, backends that need it say so and others serve. Nothing here knows a model.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

from detour.ops.device import Device

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-std=c++17", "-pthread", "-fPIC")
FOLDER = Path.home() / ".cache" / "detour" / "native"

# The dtypes that kernels over rows of numbers take, as vector.h's of_type numbers them.
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
CACHED = {**DTYPES, torch.float8_e4m3fn: 2}  # and those that attention's caches may have

_threads = 0  # 0: as many as torch


def set_threads(count: int) -> None:
    """How many threads a kernel shares its work among; 0 = as many as torch uses."""
    global _threads
    _threads = count


def threads() -> int:
    return _threads or torch.get_num_threads()


@cache
def compiler() -> str:
    """The C++ compiler's path, "" where there is none."""
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), "")


def reasons(device: Device) -> list[str]:
    """Why the native kernels cannot serve on this device; builds them to know."""
    if device.is_cuda:
        return ["it computes on a CPU"]
    if not device.instructions & {"avx2", "avx512", "amx"}:
        return ["the processor has no AVX2"]
    if not compiler():
        return ["no C++ compiler (c++, g++ or clang++) was found"]
    return [f"the native kernels did not build: {failure()}"] if failure() else []


def dtype_reasons(device: Device, dtype: torch.dtype) -> list[str]:
    """The same for a kernel that computes on rows of `dtype`."""
    if dtype not in DTYPES:
        return [f"it computes in float32 and bfloat16, not {dtype}"]
    return reasons(device)


@cache
def failure() -> str:
    """Why the library cannot be had, "" where it can. Tried once."""
    try:
        library()
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return ""


@cache
def library() -> ctypes.CDLL:
    """The loaded library; builds it if this source was not built for this processor before.

    Raises OSError or subprocess.SubprocessError when it cannot be built or loaded.
    """
    sources = sorted(SOURCES.glob("*.cpp"))
    key = hashlib.sha256(
        b"".join(source.read_bytes() for source in (*sources, *sorted(SOURCES.glob("*.h"))))
        + " ".join((compiler(), *FLAGS, _processor())).encode()
    ).hexdigest()[:16]
    target = FOLDER / f"kernels-{key}.so"
    if not target.exists():
        log.info("building the CPU kernels with %s (once)", compiler())
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as work:
            made = Path(work) / "kernels.so"
            with ThreadPoolExecutor() as pool:
                parts = list(pool.map(lambda source: _compile(source, Path(work)), sources))
            _run(["-shared", *parts, "-o", str(made)])
            os.replace(made, target)  # whole or not at all, whoever else is building it
    return ctypes.CDLL(str(target))


def _compile(source: Path, work: Path) -> str:
    made = str(work / f"{source.stem}.o")
    _run(["-c", str(source), "-o", made])
    return made


def _run(arguments: list[str]) -> None:
    command = [compiler(), *FLAGS, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise OSError(next((line for line in lines if "error" in line), lines[-1]))


@cache
def function(name: str, signature: str) -> Callable[..., None]:
    """A function of the library. One letter an argument: p pointer (int), n int64, i int, f float.

    Declared types let ctypes take plain numbers: a call costs about a microsecond.
    """
    found = library()[name]
    found.argtypes = [_TYPES[letter] for letter in signature]
    found.restype = None
    return found


_TYPES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "n": ctypes.c_int64,
    "i": ctypes.c_int,
    "f": ctypes.c_float,
}


def _processor() -> str:
    """What -march=native depends on."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return next((line for line in text.splitlines() if line.startswith("flags")), "")
