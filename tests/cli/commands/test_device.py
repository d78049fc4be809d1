"""`--device`: what commands say of a GPU, and of one that is not there."""

import json

import pytest

from llmctl.cli import app
from llmctl.cli.exits import ExitCode
from llmctl.kernels.cuda import devices
from llmctl.kernels.cuda.driver import DriverError
from llmctl.kernels.cuda.host_driver import HostDriver
from tests.engine.tiny import write_checkpoint


class NoDevice(HostDriver):
    """A driver that knows of no GPU."""

    def devices(self):
        raise DriverError("cuInit failed with 100: no CUDA-capable device is detected")


@pytest.fixture
def use():
    """Puts a driver in use for one test."""

    def put(driver):
        devices.use_driver(driver, driver.get)
        return driver

    yield put
    devices.use_driver(None)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3"))


def test_plan_sizes_the_cache_by_what_the_gpu_has_free(use, model, make_console):
    use(HostDriver(None, memory_total=8 << 30))
    found = {}
    for device in ("cuda", "auto", "cpu"):
        console = make_console()
        assert app.run(["plan", model, "--device", device, "--json"], console) == ExitCode.OK
        found[device] = json.loads(console.stdout.getvalue())
    assert found["auto"] == found["cuda"] != found["cpu"]
    assert (found["cuda"]["device"], found["cuda"]["available_bytes"]) == ("cuda:0", 8 << 30)
    assert found["cuda"]["kv_format"] == "f32" and found["cuda"]["reserve_bytes"] == (8 << 30) - int(0.9 * (8 << 30))
    console = make_console()
    app.run(["plan", model, "--device", "cuda"], console)
    assert "emulated GPU, cuda:0, 4 SMs" in console.stdout.getvalue()


def test_what_does_not_fit_on_the_gpu_is_shown_with_the_plan(use, model, make_console):
    use(HostDriver(None, memory_total=100 << 20))
    console = make_console()
    assert app.run(["plan", model, "--device", "cuda"], console) == ExitCode.CAPACITY
    assert "workspace" in console.stderr.getvalue() and "hint" in console.stderr.getvalue()


def test_doctor_lists_gpus_and_why_one_is_not_used(use, make_console):
    use(HostDriver(None, capability=(6, 1), memory_total=8 << 30))
    console = make_console()
    app.run(["doctor", "--json"], console)
    (gpu,) = json.loads(console.stdout.getvalue())["gpus"]
    assert (gpu["device"], gpu["name"], gpu["capability"]) == ("cuda:0", "emulated GPU", "6.1")
    assert gpu["problem"] == "no kernels for a GPU of compute capability 6.1"
    use(NoDevice(None))
    console = make_console()
    app.run(["doctor"], console)
    assert "none: cuInit failed with 100" in " ".join(console.stdout.getvalue().split())


def test_a_gpu_that_is_asked_for_and_not_there_ends_the_command(use, model, make_console):
    use(NoDevice(None))
    console = make_console()
    assert app.run(["chat", model, "--device", "cuda", "-p", "hi"], console) != ExitCode.OK
    assert "no CUDA-capable device is detected" in console.stderr.getvalue()
