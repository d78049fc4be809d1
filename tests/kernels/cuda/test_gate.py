"""Every kernel compiles for every architecture, without spills, into the instructions it was written for."""

import json

import pytest

from llmctl.kernels.cuda.attend import AttendShape
from llmctl.kernels.cuda.jit import ARCHITECTURES
from llmctl.kernels.cuda.table import Listed, ModelNeeds, all_kernels, model_kernels, representatives
from llmctl.kernels.cuda.tiles import SMS, blocks_per_sm, choose_attend
from llmctl.kernels.errors import NoKernel

from . import gate, least


def changes(arch: str, nvrtc_version: str, listed: list[Listed]) -> str:
    """What is not as in the table, a line for each figure, and what to do about it; empty if all is."""
    golden = json.loads(gate.GOLDEN.read_text())
    if nvrtc_version != golden["nvrtc"]:
        pytest.skip(f"the table is of NVRTC {golden['nvrtc']}, here is {nvrtc_version}")
    if gate.disassembler() is None:
        pytest.skip("the table needs nvdisasm")
    lines = []
    for name, row in gate.table(listed, arch).items():
        expected = golden[arch].get(name, {})
        lines += [
            f"{arch} {name}: {fact} {expected.get(fact, 'not in the table')} -> {figure}"
            for fact, figure in row.items()
            if figure != expected.get(fact)
        ]
    return "\n".join((*lines, "if that is meant: python tests/kernels/cuda/gate.py")) if lines else ""


def one_per_template(listed: list[Listed]) -> list[Listed]:
    return list({item.kernel.template: item for item in reversed(listed)}.values())


@pytest.mark.parametrize("arch", gate.ARCHS)
def test_the_compiler_makes_of_every_template_what_it_made_before(nvrtc_version: str, arch: str) -> None:
    assert changes(arch, nvrtc_version, one_per_template(representatives(arch))) == ""


@pytest.mark.slow
@pytest.mark.parametrize("arch", gate.ARCHS)
def test_the_compiler_makes_of_the_kernels_what_it_made_before(nvrtc_version: str, arch: str) -> None:
    listed = representatives(arch)
    assert changes(arch, nvrtc_version, listed) == ""
    assert {item.kernel.expression for item in listed} == set(json.loads(gate.GOLDEN.read_text())[arch])


@pytest.mark.parametrize("arch", gate.ARCHS)
def test_the_table_says_what_the_kernels_promise(arch: str) -> None:
    rows = json.loads(gate.GOLDEN.read_text())[arch]
    assert [line for name, row in rows.items() for line in least.shortfalls(name, arch, row)] == []
    for name, row in rows.items():
        assert row["warps_per_sm"] >= 4, name
        old = arch == "sm_75"  # whose copies are loads and stores
        if name.startswith("attend<"):
            assert row["mma"] > 0 and row["load_16" if old else "copy_16"] >= 2, name
            assert ("Fp32, float" in name) != (row["matrix_load"] > 0), name
            assert old or row["in_flight_per_sm"] >= 32 << 10, name
        if name.startswith("latent_attend<"):
            assert row["mma"] > 0 and row["matrix_load"] > 0, name
            assert old or (row["copy_16"] >= 2 and row["in_flight_per_sm"] >= 32 << 10), name
        if name.startswith("linear_mma<"):
            assert row["mma"] > 0 and row["load_16" if old else "copy_16"] > 0 and row["matrix_load"] > 0, name
            assert old or row["in_flight_per_sm"] >= 16 << 10, name
        if name.startswith(("rms_norm<", "embed<", "act_mul<", "copy_tokens", "move_blocks", "linear_vector<")):
            assert row["load_16"] > 0, name


def test_every_kernel_fits_into_its_architecture_and_has_a_stated_minimum() -> None:
    assert set(SMS) == set(least.BYTES_UNDER_WAY) == set(ARCHITECTURES)
    said = set()
    for arch in ARCHITECTURES:
        for item in all_kernels(arch):
            assert item.shared_bytes <= SMS[arch].block_shared, (arch, item)
            said.add(least.least(item.kernel.expression))
    assert said == {what for _, what in least.LEAST}


def test_what_a_kernel_has_not_got_is_named() -> None:
    row = {"spills": 0, "warps_per_sm": 16, "in_flight_per_sm": 30000, "instructions": 100, "reads": 4, "load_16": 1}
    row |= {"copy_16": 0, "float": 50, "local": 0, "loop": 80, "loop_mma": 0}
    name = "linear_vector<Bf16, WeightInt4, 64, Zero::kInt, Half, 8, End::kStore>"
    assert least.shortfalls(name, "sm_90a", row) == []
    assert least.shortfalls(name, "sm_100a", row | {"warps_per_sm": 8, "load_16": 0, "local": 4}) == [
        f"sm_100a {name}: warps_per_sm 8, not 16",
        f"sm_100a {name}: in_flight_per_sm 3e+04, not 32432",
        f"sm_100a {name}: reads of 16 bytes in a hundred 0, not 25",
        f"sm_100a {name}: 4 in local memory",
    ]


LISTING = """
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
.L_x_1:
        /*0010*/                   LDG.E R8, desc[UR4][R2.64] ;
.L_x_2:
        /*0020*/              @!P0 LDGSTS.E.BYPASS.128 [R9], desc[UR4][R2.64] ;
        /*0030*/               @P1 BRA `(.L_x_2) ;
        /*0040*/                   HMMA.16816.F32 R4, R4, R8, RZ ;
        /*0050*/                   FADD R1, R1, R2 ;
        /*0060*/                   @P0 BRA `(.L_x_1) ;
        /*0070*/                   EXIT ;
.L_x_3:
        /*0080*/                   BRA `(.L_x_3);
        /*0090*/                   NOP ;
"""


def test_instructions_are_counted_by_kind_and_in_the_main_loop() -> None:
    row = gate.count_listing(LISTING)
    assert {fact: number for fact, number in row.items() if number} == {
        "instructions": 9, "reads": 3, "load_16": 1, "copy_16": 1, "mma": 1, "float": 1, "loop": 6, "loop_mma": 1
    }  # fmt: skip


def test_decode_leaves_room_for_a_second_block_where_two_fit() -> None:
    def decode(arch: str, kv: str, head_dim: int) -> AttendShape:
        return choose_attend(arch, "bf16", "bf16", kv, head_dim, soft_cap=False, prefill=False)

    shape = decode("sm_90a", "bf16", 128)
    assert (shape.warps_n, shape.tile, shape.stages) == (4, 64, 3)
    assert decode("sm_90a", "fp8_e4m3", 128).stages == 4
    assert decode("sm_86", "bf16", 256).tile == 16
    with pytest.raises(NoKernel, match="heads have 80 dimensions; known are 32, 64, 96, 128, 160, 192, 256"):
        decode("sm_90a", "bf16", 80)


def test_occupancy_is_what_registers_and_shared_memory_allow() -> None:
    assert blocks_per_sm("sm_90a", 128, 168, 8320) == 3
    assert blocks_per_sm("sm_90a", 128, 96, 8320) == 5
    assert blocks_per_sm("sm_90a", 384, 168, 200 << 10) == 1
    assert blocks_per_sm("sm_86", 128, 32, 0) == 12


def test_a_model_needs_few_kernels_and_all_of_them_are_registered() -> None:
    needs = ModelNeeds("bf16", "bf16", "fp8_e4m3", 128, 4096, "silu")
    for arch in ("sm_80", "sm_90a"):
        kernels = model_kernels(arch, needs)
        assert len(kernels) <= 30
        assert {item.kernel for item in kernels} <= {item.kernel for item in all_kernels(arch)}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_registered_kernel_compiles_without_spills(nvrtc_version: str, arch: str) -> None:
    rows = {item.kernel.expression: gate.Jit(gate.CUBINS, arch).get(item.kernel) for item in all_kernels(arch)}
    spilling = [name for name, cubin in rows.items() if cubin.resources.spills]
    assert not spilling


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_registered_kernel_has_the_occupancy_and_the_bytes_in_flight_it_needs(
    nvrtc_version: str, arch: str
) -> None:
    jit = gate.Jit(gate.CUBINS, arch)
    lines = []
    for item in all_kernels(arch):
        row = gate.resource_row(item, arch, jit.get(item.kernel).resources)
        lines += least.shortfalls(item.kernel.expression, arch, row)
    assert lines == []
