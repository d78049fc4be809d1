"""The options of `llmctl quantize`. Names are those of the tools people come from; the first of each is canonical."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ...kernels.device import default_threads
from ...kernels.errors import UsageError
from ...quant.scheme import Scheme
from ..options import ModelArgument, ModelOption, choose_model, parse_count
from .asked import EVAL_TOKENS, SAMPLES, SEQLEN, Asked, choose_method
from .gate import METRIC_NAMES, parse_gate


def _option(*names: str, text: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, metavar=metavar, help=text)


def _count(*names: str, text: str) -> Any:
    return typer.Option(*names, parser=parse_count, metavar="N", help=text)


def asked_options(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    output: Annotated[
        str | None, _option("--output", "-o", metavar="FOLDER", text="What to make; by default a folder here.")
    ] = None,
    overwrite: Annotated[bool, _option("--overwrite", text="Replace a folder that an earlier run made.")] = False,
    awq: Annotated[bool, _option("--awq", text="Search scales and ranges for what the model reads (default).")] = False,
    rtn: Annotated[bool, _option("--rtn", text="Round to nearest, which needs no text.")] = False,
    method: Annotated[str | None, _option("--method", metavar="NAME", text="awq or rtn.")] = None,
    quantization: Annotated[
        str | None, _option("--quantization", "-q", metavar="NAME", text="The same as --method.")
    ] = None,
    bits: Annotated[int, _option("--bits", "--w-bits", metavar="N", text="Bits of a weight: 4.")] = 4,
    group_size: Annotated[
        int,
        _option(
            "--group-size",
            "--w-group-size",
            metavar="N",
            text="The largest group of weights with one scale: 128, 64 or 32; -1: a whole output.",
        ),
    ] = 128,
    strict_group_size: Annotated[
        bool,
        _option("--strict-group-size", text="Refuse a group size that some layer has to make smaller."),
    ] = False,
    sym: Annotated[
        bool, _option("--sym/--asym", text="The range of each group: around zero, or where its weights are.")
    ] = False,
    ignore: Annotated[
        list[str] | None,
        _option("--ignore", metavar="NAME", text="Keep modules with this in their name, or re:PATTERN; repeatable."),
    ] = None,
    calib_dataset: Annotated[
        str,
        _option(
            "--calib-dataset",
            metavar="TEXT",
            text="A text, JSONL or parquet file, a folder, or ID[:CONFIG[:SPLIT]] on the hub; by default text that the "
            "model writes itself.",
        ),
    ] = "",
    calib_samples: Annotated[
        int | None, _count("--calib-samples", text=f"Pieces of text to calibrate on; by default {SAMPLES}.")
    ] = None,
    calib_seqlen: Annotated[int | None, _count("--calib-seqlen", text=f"Tokens of each; by default {SEQLEN}.")] = None,
    eval_text: Annotated[
        str,
        _option(
            "--eval-text",
            metavar="TEXT",
            text="What to measure on; by default what calibration left of its text, else Python's documentation.",
        ),
    ] = "",
    eval_tokens: Annotated[
        int | None, _count("--eval-tokens", text=f"Tokens to measure on; by default {EVAL_TOKENS}.")
    ] = None,
    kv_cache_scheme: Annotated[
        str,
        _option(
            "--kv-cache-scheme",
            "--kv-cache-qformat",
            metavar="NAME",
            text="fp8 stores scales of K and V, measured on the text, for an fp8 KV cache; none does not.",
        ),
    ] = "none",
    seed: Annotated[int, _option("--seed", metavar="N", text="Which pieces of text are drawn or written.")] = 0,
    threads: Annotated[int, _count("--threads", "-t", text="CPU threads; 0: one per physical core.")] = 0,
    fail_if: Annotated[
        list[str] | None,
        _option("--fail-if", metavar="LIMIT", text=f'Exit with 1 if, say, "kl>0.05": {METRIC_NAMES}; repeatable.'),
    ] = None,
) -> Asked:
    """The run that these options ask for."""
    if output is not None and not output.strip():
        raise UsageError("--output is empty", "name the folder to make, or leave --output out")
    asked = Asked(
        model=choose_model(model, model_option),
        scheme=Scheme(
            method=choose_method(awq, rtn, method, quantization),
            bits=bits,
            group_size=group_size,
            symmetric=sym,
            strict_group_size=strict_group_size,
            ignore=tuple(ignore or ()),
        ),
        output=None if output is None else Path(output).expanduser(),
        overwrite=overwrite,
        calib_dataset=calib_dataset,
        calib_samples=calib_samples,
        calib_seqlen=calib_seqlen,
        eval_text=eval_text,
        eval_tokens=eval_tokens,
        seed=seed,
        threads=threads or default_threads(),
        fail_if=tuple(parse_gate(text) for text in fail_if or ()),
        kv_cache_scheme=kv_cache_scheme,
    )
    asked.check()
    return asked
