"""What reaches the driver: a stand-in for libcuda writes down every call with its arguments."""

import ctypes
import subprocess
from dataclasses import dataclass, field

import pytest

from llmctl.kernels.cuda.driver import DriverError
from llmctl.kernels.cuda.emulate import compiler
from llmctl.kernels.cuda.jit import Cubin, Resources
from llmctl.kernels.cuda.launch import Launcher
from llmctl.kernels.cuda.libcuda import LibCuda
from llmctl.kernels.cuda.source import Kernel

STUB = r"""
#include <cstdio>
#include <cstring>
static char text[1 << 14];
static int failing = 0;
template <class... A> static void say(const char* format, A... a) {
  std::snprintf(text + std::strlen(text), sizeof(text) - std::strlen(text), format, a...);
}
extern "C" {
const char* stub_text() { return text; }
void stub_clear() { text[0] = 0; }
void stub_fail(int status) { failing = status; }
int cuModuleLoadData(void** module, const char* image) { say("load %s\n", image); *module = (void*)1; return failing; }
int cuModuleGetFunction(void** f, void*, const char* name) { say("function %s\n", name); *f = (void*)7; return 0; }
int cuFuncSetAttribute(void* f, int a, int v) { say("attribute %ld %d=%d\n", (long)f, a, v); return 0; }
int cuGetErrorString(int status, const char** s) { *s = status == 2 ? "out of memory" : "odd"; return 0; }
int cuLaunchKernel(void* f, unsigned x, unsigned y, unsigned z, unsigned t, unsigned, unsigned, unsigned shared,
                   void* stream, void** p, void**) {
  say("launch %ld %u,%u,%u %u %u on %ld: %lx %d %g %lld\n", (long)f, x, y, z, t, shared, (long)stream,
      *(unsigned long*)p[0], *(int*)p[1], *(float*)p[2], *(long long*)p[3]);
  return failing;
}
}
"""


@dataclass
class Compiled:
    """Stands for Jit: every kernel's code is its own name."""

    asked: list[Kernel] = field(default_factory=list)

    def get(self, kernel: Kernel) -> Cubin:
        self.asked.append(kernel)
        return Cubin(kernel.expression.encode(), f"mangled_{kernel.expression}", Resources(1, 0, 0, 0, 0))


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if compiler() is None:
        pytest.skip("the stand-in for the driver needs a C++ compiler")
    folder = tmp_path_factory.mktemp("stub")
    (folder / "stub.cpp").write_text(STUB)
    subprocess.run([compiler(), "-shared", "-fPIC", "-o", folder / "stub.so", folder / "stub.cpp"], check=True)
    library = ctypes.CDLL(str(folder / "stub.so"))
    library.stub_text.restype = ctypes.c_char_p
    return library


@pytest.fixture
def calls(stub: ctypes.CDLL):
    """The calls since the last time, as lines."""
    stub.stub_fail(0)
    stub.stub_clear()

    def since() -> list[str]:
        lines = stub.stub_text().decode().splitlines()
        stub.stub_clear()
        return lines

    return since


ARGUMENTS = (ctypes.c_void_p(0xABC0), ctypes.c_int32(-3), ctypes.c_float(1.5), ctypes.c_int64(1 << 40))


def test_a_bound_launch_is_one_call_with_its_arguments(stub: ctypes.CDLL, calls) -> None:
    jit = Compiled()
    launcher = Launcher(jit, LibCuda(stub), lambda: 99)  # type: ignore[arg-type]
    bound = launcher.bind(Kernel("a.cuh", "one"), (5, 2, 1), 128, 4096, ARGUMENTS)
    assert calls() == ["load one", "function mangled_one"]
    bound.run()
    bound.run()
    assert calls() == ["launch 7 5,2,1 128 4096 on 99: abc0 -3 1.5 1099511627776"] * 2
    launcher.launch(Kernel("a.cuh", "one"), (1, 1, 1), 32, 0, ARGUMENTS)
    assert calls() == ["launch 7 1,1,1 32 0 on 99: abc0 -3 1.5 1099511627776"]
    assert jit.asked == [Kernel("a.cuh", "one")]


def test_more_shared_memory_than_usual_is_asked_for_when_bound(stub: ctypes.CDLL, calls) -> None:
    launcher = Launcher(Compiled(), LibCuda(stub), lambda: 0)  # type: ignore[arg-type]
    kernel = Kernel("a.cuh", "big")
    launcher.bind(kernel, (1, 1, 1), 32, 100_000, ARGUMENTS)
    assert calls()[2:] == ["attribute 7 8=100000"]
    launcher.bind(kernel, (1, 1, 1), 32, 90_000, ARGUMENTS)
    assert calls() == []
    launcher.bind(kernel, (1, 1, 1), 32, 120_000, ARGUMENTS)
    assert calls() == ["attribute 7 8=120000"]


def test_a_failing_call_is_named_with_the_drivers_words(stub: ctypes.CDLL, calls) -> None:
    bound = Launcher(Compiled(), LibCuda(stub), lambda: 0).bind(  # type: ignore[arg-type]
        Kernel("a.cuh", "one"), (1, 1, 1), 32, 0, ARGUMENTS
    )
    stub.stub_fail(2)
    with pytest.raises(DriverError, match="cuLaunchKernel failed with 2: out of memory"):
        bound.run()
