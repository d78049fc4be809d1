"""Where the tests of CUDA kernels keep what they compiled, and what they need to run at all."""

from pathlib import Path

import pytest

from llmctl.kernels.cuda import nvrtc
from llmctl.kernels.cuda.emulate import compiler
from llmctl.kernels.errors import UsageError

BUILDS = Path(__file__).resolve().parents[3] / "build" / "emulated"


@pytest.fixture(scope="session")
def builds() -> Path:
    """The folder of emulated kernels, kept between runs: a build is found by the hash of what went into it."""
    if compiler() is None:
        pytest.skip("emulation needs a C++ compiler")
    return BUILDS


@pytest.fixture(scope="session")
def nvrtc_version() -> str:
    """The compiler's version; tests that ask for it are skipped where it is not installed."""
    try:
        return nvrtc.version()
    except UsageError as error:
        pytest.skip(error.message)
