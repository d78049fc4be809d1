"""`llmctl models` on a cache with entries of every state."""

import json
import types

import pytest

from llmctl.cli import app
from llmctl.cli.exits import ExitCode
from llmctl.engine.load import packed
from llmctl.engine.load.packed import Entry


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """LLMCTL_CACHE, empty."""
    monkeypatch.setenv("LLMCTL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LLMCTL_MODEL", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def entries(tmp_path, monkeypatch):
    """Three entries: one in use, one whose source has gone, one broken."""
    source = tmp_path / "tiny.gguf"
    source.write_bytes(b"x" * 10)
    monkeypatch.setattr(packed, "entry_key", lambda source, dtype, implementation: "aaaa" * 8)
    found = (
        Entry(
            "aaaa" * 8,
            tmp_path / "a",
            2048,
            "tiny",
            str(source),
            "auto",
            ("int4g32", "int8g32"),
            roundings=("Q6_K rounded",),
        ),
        Entry("bbbb" * 8, tmp_path / "b", 1024, "gone", str(tmp_path / "gone.gguf"), "float32", ("f32",)),
        Entry("cccc" * 8, tmp_path / "c", 3, problem="weights.bin is cut"),
    )
    monkeypatch.setattr(packed, "list_entries", lambda cache: found)
    return found


def test_list_shows_every_entry(console, entries):
    assert app.run(["models", "list"], console) == ExitCode.OK
    text = console.stdout.getvalue()
    assert (
        "tiny" in text
        and "int4g32, int8g32; Q6_K rounded" in text
        and "2.00 KiB" in text
        and "weights.bin is cut" in text
    )


def test_list_says_who_reads_the_weights_of_a_text_entry(console, tmp_path, monkeypatch):
    entry = Entry("dddd" * 8, tmp_path / "d", 5, "other", "x", "auto", implementation="transformers 5.0")
    monkeypatch.setattr(packed, "list_entries", lambda cache: (entry,))
    app.run(["models", "list"], console)
    assert "text only, for transformers 5.0" in console.stdout.getvalue()


def test_list_as_json(console, entries):
    app.run(["models", "list", "--json"], console)
    report = json.loads(console.stdout.getvalue())
    assert [entry["model"] for entry in report] == ["tiny", "gone", ""]
    assert report[0]["bytes"] == 2048 and report[0]["roundings"] == ["Q6_K rounded"]


def test_empty_cache_lists_nothing(console, cache):
    assert app.run(["models", "list", "--json"], console) == ExitCode.OK
    assert json.loads(console.stdout.getvalue()) == []
    assert app.run(["models", "list"], console) == ExitCode.OK
    assert "no packed models yet" in console.stderr.getvalue()


@pytest.mark.parametrize(
    ("wanted", "checked"), [([], "abc"), (["tiny"], "a"), (["bbbb"], "b"), (["aaaaaaaaaaaa"], "a")]
)
def test_verify_reads_what_is_named(console, entries, monkeypatch, wanted, checked):
    seen = []
    monkeypatch.setattr(packed, "verify", lambda entry: seen.append(entry.key[0]) or True)
    assert app.run(["models", "verify", *wanted], console) == ExitCode.OK
    assert seen == list(checked)


def test_verify_of_a_damaged_entry_ends_with_1(console, entries, monkeypatch):
    monkeypatch.setattr(packed, "verify", lambda entry: entry.name == "tiny")
    assert app.run(["models", "verify", "--json"], console) == ExitCode.FAILURE
    assert [entry["intact"] for entry in json.loads(console.stdout.getvalue())] == [True, False, False]
    assert "damaged" in console.stderr.getvalue()


def test_verify_of_an_unknown_entry_is_a_usage_error(console, entries):
    assert app.run(["models", "verify", "zzz"], console) == ExitCode.USAGE
    assert "there is no packed model `zzz`" in console.stderr.getvalue()


@pytest.mark.parametrize(("option", "kept"), [([], ["aaaa" * 8]), (["--all"], [])])
def test_prune_keeps_what_a_start_would_use(console, entries, monkeypatch, option, kept):
    def prune(cache, keep):
        assert list(keep) == kept
        return tuple(entry for entry in entries if entry.key not in keep)

    monkeypatch.setattr(packed, "prune", prune)
    assert app.run(["models", "prune", *option], console) == ExitCode.OK
    assert "gone" in console.stdout.getvalue()
    assert ("tiny" in console.stdout.getvalue()) == bool(option)


def test_pull_packs_and_prints_where_the_files_are(console, cache, tmp_path, monkeypatch):
    from llmctl.engine.load import hub, model

    calls = []
    source = types.SimpleNamespace(path=tmp_path / "tiny.gguf", kind="gguf", name="tiny")

    def resolve(name, environment, progress):
        progress("downloading", 1, 2)
        calls.append(name)
        return source

    monkeypatch.setattr(hub, "resolve", resolve)
    monkeypatch.setattr(
        model,
        "open_model",
        lambda source, implementation, dtype, cache, progress: calls.append((source.name, implementation, dtype)),
    )
    assert app.run(["models", "pull", "org/tiny", "--dtype", "bf16"], console) == ExitCode.OK
    assert calls == ["org/tiny", ("tiny", "auto", "bfloat16")]
    assert console.stdout.getvalue() == f"{source.path}\n"
    assert console.stderr.getvalue() == "downloading\n"
