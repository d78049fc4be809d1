"""Listening, and what is said when one cannot."""

import socket

import pytest

from llmctl.cli.api.sockets import listen, listen_unix, url
from llmctl.kernels.errors import UsageError


def test_port_zero_takes_a_free_one_that_nobody_else_gets():
    with listen("127.0.0.1", 0) as listener:
        address = url(listener, tls=False)
        port = int(address.removeprefix("http://127.0.0.1:"))
        with pytest.raises(UsageError, match=f"port {port} on 127.0.0.1 is in use"):
            listen("127.0.0.1", port)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_an_ipv6_address_is_written_in_brackets():
    try:
        listener = listen("::1", 0)
    except UsageError:
        pytest.skip("no IPv6 here")
    with listener:
        assert url(listener, tls=True).startswith("https://[::1]:")


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_an_address_of_another_machine_is_refused(host):
    with pytest.raises(UsageError, match=host):
        listen(host, 0)


def test_a_socket_file_that_nobody_serves_is_replaced_and_a_served_one_is_not(tmp_path):
    path = tmp_path / "socket"
    listen_unix(path).close()
    assert path.exists()
    with listen_unix(path) as listener:
        assert url(listener, tls=False) == f"unix:{path}"
        with pytest.raises(UsageError, match="another server listens"):
            listen_unix(path)


def test_a_file_that_is_no_socket_is_left_alone(tmp_path):
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(UsageError, match="exists and is no socket"):
        listen_unix(path)
    assert path.read_text() == "mine"
    with pytest.raises(UsageError, match="cannot listen"):
        listen_unix(tmp_path / "none" / "socket")
