from __future__ import annotations

import subprocess
import sys

import pytest

from llmctl.kernels.errors import CheckpointError, UnsupportedModel
from llmctl.quant.formats.awq import AwqFormat
from llmctl.quant.formats.detect import Found, detect_format, find_config
from llmctl.quant.formats.gptq import GptqFormat


def test_the_config_itself_wins_over_other_files() -> None:
    own = {"quant_method": "awq", "bits": 4, "group_size": 64}
    assert find_config({"quantization_config": own}, lambda name: {"bits": 8}) == Found("config.json", own)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False}, GptqFormat(1, 4, 128)),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "version": "GEMM"}, AwqFormat("gemm", 128)),
    ],
)
def test_files_of_older_tools_name_their_tool_by_their_own_name(
    name: str, content: dict[str, object], expected: object
) -> None:
    found = find_config({}, {name: content}.get)
    assert found is not None and found.file == name
    assert detect_format(found.config) == expected


def test_a_model_without_any_config_is_not_quantized() -> None:
    assert find_config({"model_type": "llama"}, lambda name: None) is None


def test_an_unknown_method_is_refused_by_name() -> None:
    found = find_config({}, {"hf_quant_config.json": {"quantization": {}}}.get)
    assert found is not None
    with pytest.raises(UnsupportedModel, match="modelopt"):
        detect_format(found.config)


@pytest.mark.parametrize("value", ["4", 4.5, True])
def test_a_config_of_wrong_types_is_an_error_that_shows_the_value(value: object) -> None:
    with pytest.raises(CheckpointError, match="bits"):
        detect_format({"quant_method": "gptq", "bits": value, "group_size": 128})


def test_reading_and_writing_formats_loads_no_torch() -> None:
    code = (
        "import sys\nfrom llmctl.quant.formats import detect, safetensors_write\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"
