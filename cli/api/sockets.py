"""The listening socket, opened before anything is loaded: a port in use is known at once, not after a minute."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

from ...kernels.errors import UsageError

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on this address; port 0 takes any free one. Raises UsageError if it cannot."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, OverflowError, UnicodeError) as error:
        raise UsageError(f"`{host}` is no address of this machine: {error}", "set `--host`") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # binding alone would not keep another server from the port
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} on {host} is in use", "stop what listens there, or choose another with `--port` (0: any)"
            ) from error
        raise UsageError(
            f"cannot listen on {host}, port {port}: {error.strerror}", "set `--host` and `--port`"
        ) from error
    return listener


def listen_unix(path: Path) -> socket.socket:
    """A socket that listens on this path; a socket file that nobody serves any more is replaced."""
    if path.exists():
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise UsageError(f"`{path}` exists and is no socket", "choose another `--uds`")
        if _served(path):
            raise UsageError(f"another server listens on `{path}`", "stop it, or choose another `--uds`")
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise UsageError(f"cannot listen on `{path}`: {reason}", "choose another `--uds`") from error
    return listener


def url(listener: socket.socket, tls: bool) -> str:
    """Where clients reach the socket: the base of the API's paths."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{os.path.abspath(listener.getsockname())}"
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:  # not allowed to, or too busy to answer: somebody is there
            return True
    return True
