"""CUDA C++ kernels: compiled with NVRTC on the machine that runs them, launched by the driver.

For the few kernels whose gap to the bound Triton leaves open. No toolkit is needed: PyTorch brings
NVRTC, and the sources include no headers. Knows no op.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

STATIC_SHARED = 48 * 1024  # a kernel that takes more has to be told so


class CudaError(RuntimeError):
    """NVRTC or the driver refused."""


def _nvrtc() -> ctypes.CDLL:
    major = (torch.version.cuda or "0").split(".")[0]
    return ctypes.CDLL(f"libnvrtc.so.{major}")


def _check(status: int, what: str) -> None:
    if status:
        raise CudaError(f"{what} failed with status {status}")


def compile_source(library: ctypes.CDLL, source: str, options: Sequence[str]) -> bytes:
    """The cubin of `source`; CudaError with the compiler's log where it does not compile."""
    program = ctypes.c_void_p()
    text = source.encode()
    created = library.nvrtcCreateProgram(ctypes.byref(program), text, b"kernel.cu", 0, None, None)
    _check(created, "nvrtcCreateProgram")
    try:
        encoded = [option.encode() for option in options]
        array = (ctypes.c_char_p * len(encoded))(*encoded)
        size = ctypes.c_size_t()
        if library.nvrtcCompileProgram(program, len(encoded), array):
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            raise CudaError(log.value.decode(errors="replace"))
        _check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        cubin = ctypes.create_string_buffer(size.value)
        _check(library.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
        return cubin.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


class Kernel:
    """One __global__ function of a loaded module. Arguments: tensors, int (32 bit), float (32)."""

    def __init__(self, cubin: bytes, name: str, shared: int) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.shared = shared
        module = ctypes.c_void_p()
        _check(self.driver.cuModuleLoadData(ctypes.byref(module), cubin), "cuModuleLoadData")
        self.function = ctypes.c_void_p()
        found = self.driver.cuModuleGetFunction(ctypes.byref(self.function), module, name.encode())
        _check(found, f"finding {name}")
        if shared > STATIC_SHARED:
            # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(self.driver.cuFuncSetAttribute(self.function, 8, shared), "shared memory")

    def __call__(self, grid: tuple[int, int, int], threads: int, *arguments: Any) -> None:
        """Launch on the current stream."""
        values: list[Any] = []
        for argument in arguments:
            if isinstance(argument, Tensor):
                values.append(ctypes.c_void_p(argument.data_ptr()))
            elif isinstance(argument, int):
                values.append(ctypes.c_int(argument))
            else:
                values.append(ctypes.c_float(argument))
        addresses = [ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values]
        array = (ctypes.c_void_p * len(addresses))(*addresses)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status = self.driver.cuLaunchKernel(
            self.function, *grid, threads, 1, 1, self.shared, stream, array, None
        )
        _check(status, "cuLaunchKernel")


@cache
def kernel(source: str, name: str, shared: int, defines: tuple[str, ...], device: int) -> Kernel:
    """`name` of `source` for CUDA device `device`, compiled once; `defines` as "NAME=value"."""
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # the driver's context exists from here on
        torch.empty(1, device="cuda")
        major, minor = torch.cuda.get_device_capability()
        options = [f"--gpu-architecture=sm_{major}{minor}", "--std=c++17", "--use_fast_math"]
        cubin = compile_source(_nvrtc(), source, [*options, *(f"-D{d}" for d in defines)])
        return Kernel(cubin, name, shared)


@cache
def missing() -> str:
    """Why nothing can be compiled here, "" where it can."""
    try:
        _nvrtc()
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"NVRTC or the driver is not there: {error}"
    return ""
