"""Sizes as people read them."""

from __future__ import annotations


def format_bytes(count: int) -> str:
    """A size in binary units with about three digits: 512 B, 4.00 KiB, 59.7 MiB."""
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 999.5 or unit == "TiB":
            break
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"
