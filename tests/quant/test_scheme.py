from __future__ import annotations

import pytest

from llmctl.kernels.errors import UnsupportedModel, UsageError
from llmctl.kernels.formats import WeightFormat
from llmctl.quant.scheme import Scheme, module_format, quantized_linears, stored_group_size


@pytest.mark.parametrize(
    ("asked", "widths", "stored"),
    [
        (128, [1536, 256], 128),
        (128, [576, 1536], 64),
        (64, [1536], 64),
        (128, [96, 128], 32),
        (-1, [96], -1),
    ],
)
def test_stored_group_size_is_the_largest_that_divides_every_width(asked: int, widths: list[int], stored: int) -> None:
    assert stored_group_size(asked, widths, strict=False) == stored


def test_strict_group_size_names_the_width_and_what_works() -> None:
    assert stored_group_size(64, [576], strict=True) == 64
    with pytest.raises(UsageError, match="128 does not divide 576") as error:
        stored_group_size(128, [1536, 576], strict=True)
    assert "--group-size 64" in error.value.hint


@pytest.mark.parametrize("asked", [128, -1])
def test_inputs_that_32_does_not_divide_are_refused(asked: int) -> None:
    with pytest.raises(UnsupportedModel, match="100 inputs"):
        stored_group_size(asked, [128, 100], strict=False)


@pytest.mark.parametrize("asked", [0, 16, -2, 96, 256, 10**9])
def test_group_sizes_that_no_kernel_reads_are_refused(asked: int) -> None:
    with pytest.raises(UsageError, match=f"group size {asked}"):
        stored_group_size(asked, [128], strict=False)


def test_every_decoder_linear_is_quantized_and_nothing_else() -> None:
    shapes = {
        "model.embed_tokens.weight": (304, 64),
        "lm_head.weight": (304, 64),
        "model.norm.weight": (64,),
        "model.layers.0.input_layernorm.weight": (64,),
        "model.layers.0.self_attn.q_proj.weight": (64, 64),
        "model.layers.0.self_attn.q_proj.bias": (64,),
        "model.layers.11.mlp.down_proj.weight": (64, 96),
    }
    assert quantized_linears(shapes) == {"model.layers.0.self_attn.q_proj": 64, "model.layers.11.mlp.down_proj": 96}
    with pytest.raises(UnsupportedModel):
        quantized_linears({"lm_head.weight": (304, 64)})


def test_modules_to_ignore_are_named_by_a_part_or_a_pattern() -> None:
    names = [f"model.layers.{i}.mlp.{part}_proj" for i in (0, 1, 11) for part in ("up", "down")]
    shapes = {"lm_head.weight": (304, 64), **{f"{name}.weight": (64, 64) for name in names}}
    assert set(Scheme().linears(shapes)) == set(names)
    assert set(Scheme(ignore=("layers.1.", "down")).linears(shapes)) == {names[0], names[4]}
    assert set(Scheme(ignore=(r"re:layers\.1\d", "lm_head")).linears(shapes)) == set(names[:4])
    for wrong in (("layers.2.",), ("proj",), ("re:(",)):
        with pytest.raises(UsageError, match="--ignore"):
            Scheme(ignore=wrong).linears(shapes)


def test_a_scheme_names_one_format() -> None:
    assert Scheme(group_size=128).format([576]) == WeightFormat("int4", 64, "int")
    per_output = Scheme("rtn", group_size=-1, symmetric=True).format([96])
    assert module_format(per_output, 96) == WeightFormat("int4", 96)


@pytest.mark.parametrize("change", [{"method": "magic"}, {"bits": 3}])
def test_unknown_methods_and_bits_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Scheme(**change)
