"""Linear layers of 16-bit weights through NVIDIA's library, where a row's bits may depend on its company.

Which sum a library takes follows from the number of rows, so `deterministic` machines never come here: there our own
kernels multiply, in a fixed order. Weights are kept as rows, which our kernels do not read, so one of the two serves a
layer whatever its number of rows.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Protocol

from ..cpu.pack import unpack
from ..ops import LOGIT_ROWS, ROWS, LinearArgs
from . import rows as kernels
from .call import Call
from .machine import Machine
from .steps import DTYPES, VALUES, as_stored

_THREADS = 128


class Library(Protocol):
    """Matrix products on the machine in use, behind everything launched before."""

    def multiply(
        self, dtype: str, y: int, x: int, weight: int, *, rows: int, outputs: int, inputs: int, width: int, add: bool
    ) -> None:
        """y[rows, :outputs] (+)= x[rows, inputs] weight[outputs, inputs]^T, sums in float32; width: of a row of y."""
        ...


_library: list[Library] = []


def use_library(library: Library | None) -> None:
    """Layers that are bound from now on may use this library; None for none."""
    _library[:] = [] if library is None else [library]


@dataclass(frozen=True, slots=True, eq=False)
class LibraryLinear:
    """A linear layer, for the rows now in the batch. Its bias goes first, and products are added to it."""

    args: LinearArgs
    machine: Machine
    library: Library
    weight: int
    bias: int

    def run(self) -> None:
        args, machine, which = self.args, self.machine, LOGIT_ROWS if self.args.logit_rows_only else ROWS
        rows = int(args.batch.counts[which])
        if rows == 0:
            return
        dtype, width, y = DTYPES[args.out.dtype], args.out.shape[1], machine.address(args.out)
        calls = []
        if self.bias:
            across = -(-width // (_THREADS * VALUES[dtype]))
            count = machine.address(args.batch.counts) + 4 * which
            arguments = (
                ctypes.c_void_p(y), ctypes.c_void_p(self.bias), ctypes.c_void_p(count), ctypes.c_int32(width)
            )  # fmt: skip
            calls.append(Call(kernels.bias_rows(dtype, add=args.add), (rows, across, 1), _THREADS, 0, arguments))
        machine.launch(calls)  # also without any: what the step sends has to be there
        self.library.multiply(
            dtype, y, machine.address(args.act.values), self.weight,
            rows=rows, outputs=args.weight.n, inputs=args.weight.k, width=width, add=args.add or bool(self.bias),
        )  # fmt: skip


def refuse_library(args: LinearArgs, machine: Machine) -> str | None:
    """Why the library does not multiply this layer, None if it does."""
    if machine.deterministic:
        return "its bits depend on the number of rows, which `--deterministic` forbids"
    if not _library:
        return "no library of matrix products is in use"
    dtype = DTYPES.get(args.out.dtype, "")
    if args.weight.format.kind != dtype or dtype not in ("f16", "bf16"):
        return f"a {args.weight.format.name} weight with {dtype} activations; 16-bit floats of one type are multiplied"
    if args.bias is not None and len(args.bias) != args.out.shape[1]:
        return f"a bias of {len(args.bias)} values for rows of {args.out.shape[1]}"
    return None


def build_library(args: LinearArgs, machine: Machine) -> tuple[LibraryLinear]:
    bias = 0 if args.bias is None else machine.upload(as_stored(args.bias, DTYPES[args.out.dtype]))
    return (LibraryLinear(args, machine, _library[0], machine.upload(unpack(args.weight)[0]), bias),)
