"""`llmctl bench cache-sim` from a trace file to its figures."""

import json

import pytest

from llmctl.cli import app
from llmctl.cli.exits import ExitCode


def write(path, lines):
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_hit_rates_are_counted_in_prompt_tokens_for_every_size(console, tmp_path):
    asked = [{"tokens": [1] * 32 + [i] * 32, "prompt_len": 48} for i in range(2, 6)]
    line = ["bench", "cache-sim", write(tmp_path / "t.jsonl", asked * 2), "--block-size", "16", "--json"]
    assert app.run([*line, "--sizes", "4,100"], console) == ExitCode.OK
    found = json.loads(console.stdout.getvalue())
    assert (found["requests"], found["distinct_blocks"]) == (8, 2 + 4 * 2)
    assert [each["blocks"] for each in found["sizes"]] == [4, 100]
    small, large = found["sizes"]
    assert large["lru"]["hit_tokens"] == large["lru-k"]["hit_tokens"] == 3 * 32 + 4 * 48
    assert large["lru"]["hit_rate"] == found["best_hit_rate"] == (3 * 32 + 4 * 48) / (8 * 48)
    assert small["lru"]["hit_tokens"] == 7 * 32 and small["lru"]["evictions"] == 7 * 2


def test_a_published_trace_of_block_hashes_is_read_and_shown_as_a_table(console, tmp_path):
    asked = [{"timestamp": i, "input_length": 1024, "output_length": 5, "hash_ids": [0, i]} for i in range(1, 51)]
    assert app.run(["bench", "cache-sim", write(tmp_path / "t.jsonl", asked)], console) == ExitCode.OK
    text = console.stdout.getvalue()
    assert "50 requests, 51 distinct blocks; at most 49.00% can hit" in text
    assert "hits, lru-2" in text and "100%" in text


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "has no requests"),
        ([{"tokens": [1]}, {"prompt": "x"}], "line 2 of"),
        ([{"tokens": [1]}, {"hash_ids": [1]}], "line 2 of"),
        ([{"tokens": [1], "prompt_len": 2}], "line 1 of"),
        ([{"tokens": "text"}], "line 1 of"),
    ],
)
def test_what_is_no_trace_is_named(console, tmp_path, lines, said):
    assert app.run(["bench", "cache-sim", write(tmp_path / "t.jsonl", lines)], console) == ExitCode.USAGE
    assert said in console.stderr.getvalue()


def test_a_missing_file_is_named(console, tmp_path):
    assert app.run(["bench", "cache-sim", str(tmp_path / "none")], console) == ExitCode.USAGE
    assert "cannot read" in console.stderr.getvalue()
