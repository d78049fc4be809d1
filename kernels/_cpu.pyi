"""The C++ extension (kernels/cpu/bindings.cpp). Addresses are ints; who passes one keeps its array alive."""

from collections.abc import Sequence

def isa() -> str: ...
def isas() -> list[str]: ...
def set_isa(name: str) -> None: ...
def threads() -> int: ...
def set_threads(threads: int) -> None: ...
def workspace_bytes() -> int: ...
def probe(what: str, rounds: int, data: int, bytes: int) -> float:
    """Bytes read ("read") or operations done ("fma", "int16", "int8") by all threads in these rounds."""

def ask_for_large_pages(data: int, bytes: int) -> bool:
    """Ask that a mapping of `bytes` at `data` be read and mapped in large pages; False where there are none."""

def move_to_large_pages(data: int, bytes: int) -> int:
    """Put a copy on large pages in the place of a read-only mapping; 0, or an errno with everything as before."""

class Batch:
    def __init__(
        self, counts: int, token: int, position: int, slot: int, seq_first: int, seq_rows: int, logit_rows: int
    ) -> None: ...

class Rows:
    def __init__(self, data: int, stride: int, count: int) -> None: ...

class Weight:
    def __init__(self, kind: str, group: int, zero: str, n: int, k: int, data: int, bytes: int) -> None: ...

class Form:
    def __init__(
        self, kind: str, group: int, codes: int, scales: int, sums: int, order: int, wide: int, high: int
    ) -> None: ...

class Act:
    def __init__(self, k: int, max_rows: int, rows: int, values: int, forms: Sequence[Form]) -> None: ...

class Kv:
    def __init__(
        self,
        kind: str,
        arena: int,
        block_stride: int,
        layer_offset: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        table: int,
        max_blocks: int,
        scales: int,
    ) -> None: ...

class Latents:
    def __init__(
        self,
        kind: str,
        arena: int,
        block_stride: int,
        layer_offset: int,
        block_size: int,
        width: int,
        table: int,
        max_blocks: int,
    ) -> None: ...

class Op:
    """Keeps `owner` alive: the record whose arrays it reads and writes."""

    def run(self) -> None: ...

def embed(batch: Batch, weight: Weight, out: Rows, scale: float, owner: object) -> Op: ...
def norm(batch: Batch, x: Rows, weight: int, eps: float, act: Act, logit_rows_only: bool, owner: object) -> Op: ...
def norm_add(batch: Batch, x: Rows, weight: int, width: int, eps: float, out: Rows, owner: object) -> Op: ...
def linear(
    batch: Batch,
    act: Act,
    weight: Weight,
    order: int,
    bias: int,
    out: Rows,
    add: bool,
    logit_rows_only: bool,
    may_screen: bool,
    owner: object,
) -> Op: ...
def rope_store(
    batch: Batch,
    q: Rows,
    k: Rows,
    v: Rows,
    q_norm: int,
    k_norm: int,
    norm_eps: float,
    cos: int,
    sin: int,
    num_heads: int,
    q_scale: float,
    kv: Kv,
    steer_order: int,
    steer_follow: int,
    steer_level: int,
    steer_centre: int,
    owner: object,
) -> Op: ...
def attend(
    batch: Batch, q: Rows, num_heads: int, kv: Kv, window: int, max_positions: int, act: Act, owner: object
) -> Op: ...
def latent(
    batch: Batch,
    q: Rows,
    latents: Rows,
    kv_norm: int,
    norm_eps: float,
    up: Weight,
    order: int,
    cos: int,
    sin: int,
    interleaved: bool,
    num_heads: int,
    nope_dim: int,
    value_dim: int,
    q_scale: float,
    kv: Latents,
    max_positions: int,
    act: Act,
    owner: object,
) -> Op: ...
def act_mul(batch: Batch, gate: Rows, up: Rows, activation: str, act: Act, owner: object) -> Op: ...

class Program:
    """Keeps `ops` alive, which must be a sequence that does not change."""

    def __init__(self, ops: Sequence[Op], batch: Batch) -> None: ...
    def replay(self) -> None: ...
    def barriers(self, rows: int, logit_rows: int) -> int: ...

class KvCopy:
    def __init__(
        self,
        arena: int,
        block_stride: int,
        num_layers: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        value_bytes: int,
        scale_bytes: int,
        pairs: bool,
    ) -> None: ...
    def __call__(self, source: int, target: int, tokens: int) -> None: ...

class Sampler:
    def __init__(
        self,
        logits: Rows,
        vocab_size: int,
        rows: int,
        token: int,
        logprob: int,
        top_ids: int,
        top_logprobs: int,
        finite: int,
    ) -> None: ...
    def __call__(self, rows: int) -> None: ...
