"""CUDA C to machine code, by the compiler that torch's own CUDA packages bring (NVRTC).

Names nothing of torch. Threads: any; the compiler has no state of its own.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from .driver import DriverError

_open = ctypes.CDLL
_SUCCESS = 0
_LOG_LENGTH = 400


def compile_cuda(
    source: str, architecture: str, macros: Mapping[str, int], cuda_version: str
) -> bytes:
    """The machine code of ``source``.

    Args:
        architecture: such as ``sm_90``.
        macros: defined before the first line.
        cuda_version: of torch, such as ``13.0``: its major number is in the library's name.
    Raises: DriverError where there is no compiler, or it refuses; the text has what it said.
    """
    library = _library(cuda_version)
    program = ctypes.c_void_p()
    text = source.encode("ascii")
    _check(
        library.nvrtcCreateProgram(ctypes.byref(program), text, b"courier.cu", 0, None, None),
        "nvrtcCreateProgram",
    )
    try:
        options = [f"--gpu-architecture={architecture}", "--std=c++14"]
        options += [f"-D{name}={value}" for name, value in macros.items()]
        given = (ctypes.c_char_p * len(options))(*(o.encode("ascii") for o in options))
        code = library.nvrtcCompileProgram(program, len(options), given)
        if code != _SUCCESS:
            said = _answer(library, program, "ProgramLog").rstrip(b"\0")
            raise DriverError(
                f"nvrtcCompileProgram answered {code}: "
                f"{said.decode('utf-8', 'replace')[:_LOG_LENGTH]}"
            )
        return _answer(library, program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _answer(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(library, f"nvrtcGet{what}")(program, buffer), what)
    return buffer.raw


def _library(cuda_version: str) -> ctypes.CDLL:
    problems: list[str] = []
    for name in _names(cuda_version):
        library = _opened(name, problems)
        if library is not None:
            return library
    raise DriverError(f"NVIDIA's compiler cannot be opened: {problems[-1]}")


def _opened(name: str, problems: list[str]) -> ctypes.CDLL | None:
    try:
        return _open(name)
    except OSError as error:
        problems.append(str(error))
        return None


def _names(cuda_version: str) -> Iterator[str]:
    """Where torch's packages put it, then by its bare name, which the system may know."""
    major = cuda_version.partition(".")[0]
    names = [f"nvrtc64_{major}0_0.dll"] if sys.platform == "win32" else [f"libnvrtc.so.{major}"]
    for folder in sys.path:
        for name in names:
            for pattern in (f"nvidia/*/lib/{name}", f"nvidia/*/bin/**/{name}", f"torch/lib/{name}"):
                yield from (str(path) for path in sorted(Path(folder).glob(pattern)))
    yield from names


def _check(code: int, call: str) -> None:
    if code != _SUCCESS:
        raise DriverError(f"{call} answered {code}")
