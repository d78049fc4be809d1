"""NVIDIA's run-time compiler, from the packages of the extra `cuda` or the system: source text to machine code.

Called through ctypes: the few functions that matter have not changed in ten years, and nothing else needs to be
installed or imported to compile. The library is loaded when first asked for.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path

from ..errors import LlmctlError, UsageError

_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")


class CompileError(LlmctlError):
    """A kernel does not compile; the compiler's log is the message."""


@functools.cache
def version() -> str:
    """`13.0`; raises UsageError where the compiler is not installed."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return f"{major.value}.{minor.value}"


def compile(text: str, expression: str, options: tuple[str, ...]) -> tuple[bytes, str, str]:
    """(cubin, mangled name of the kernel that `expression` names, log)."""
    library, program = _library(), ctypes.c_void_p()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None))
    try:
        _check(library.nvrtcAddNameExpression(program, expression.encode()))
        words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = library.nvrtcCompileProgram(program, len(options), words)
        log = _bytes(program, "ProgramLog").decode(errors="replace").strip("\0\n ")
        if status != 0:
            raise CompileError(f"`{expression}` does not compile with `{' '.join(options)}`:\n{log}")
        symbol = ctypes.c_char_p()
        _check(library.nvrtcGetLoweredName(program, expression.encode(), ctypes.byref(symbol)))
        assert symbol.value is not None
        return _bytes(program, "CUBIN"), symbol.value.decode(), log
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(_library(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    out = ctypes.create_string_buffer(size.value)
    _check(getattr(_library(), f"nvrtcGet{what}")(program, out))
    return out.raw


@functools.cache
def _library() -> ctypes.CDLL:
    for path in (*_packaged(), *map(Path, _NAMES)):
        try:
            # It looks for its other half by name, in the system's folders only; what is loaded is found.
            if path.is_absolute():
                for half in path.parent.glob("libnvrtc-builtins.so*"):
                    ctypes.CDLL(str(half))
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library
    raise UsageError(
        f"kernels cannot be compiled: {_NAMES[0]} is not found",
        "install NVIDIA's compiler with `pip install 'llmctl-toolchain[cuda]'`",
    )


def _packaged() -> list[Path]:
    """Where pip puts the library."""
    try:
        spec = importlib.util.find_spec("nvidia.cu13")
    except ModuleNotFoundError:
        return []
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    return [Path(folder) / "lib" / _NAMES[0] for folder in folders]


def _check(status: int) -> None:
    if status != 0:
        raise CompileError(f"NVRTC failed: {_library().nvrtcGetErrorString(status).decode()}")
