"""`python -m llmctl.cli.bench.fetch_pg19 REPO FOLDER`: the books of a PG-19 repository on the hub as text files.

FOLDER appears when all of them are there. Each of the two waits has a deadline, kept by an alarm that ends the process:
the hub's client retries in its own way, and a benchmark must not hang on a network that swallows packets.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

ANSWER_S = 10
DOWNLOAD_S = 300


def main(repo: str, folder: Path) -> None:
    """Ask the hub for the list of files, download the parquet ones, write their `text` column."""
    signal.alarm(ANSWER_S)
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    info = HfApi().dataset_info(repo, timeout=ANSWER_S / 2)
    names = sorted(item.rfilename for item in info.siblings or () if item.rfilename.endswith(".parquet"))
    if not names:
        sys.exit(f"{repo} has no parquet files")
    signal.alarm(DOWNLOAD_S)
    files = [hf_hub_download(repo, name, repo_type="dataset", revision=info.sha) for name in names]
    signal.alarm(0)
    write_books(files, folder)


def write_books(files: list[str], folder: Path) -> None:
    """One text file per row of the parquet files, in a folder that is complete once it exists."""
    from datasets import Dataset

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="pg19-") as scratch:
        books = Path(scratch) / "books"
        books.mkdir()
        cache = str(Path(scratch) / "cache")
        for number, row in enumerate(Dataset.from_parquet(files, columns=["text"], cache_dir=cache)):
            (books / f"{number:03}.txt").write_text(row["text"], "utf-8")
        os.rename(books, folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
