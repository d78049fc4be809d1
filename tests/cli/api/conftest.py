"""Servers for the tests: one for each module, and more where a test asks for its own."""

import pytest

from tests.cli.api.live import ENGINE, Server
from tests.engine.tiny import write_checkpoint


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture(scope="module")
def start(folder):
    """Start a server of the tiny model; it ends with the test module."""
    servers = []

    def start(*arguments, model=folder, wait=True, **environment):
        server = Server(model, "--served-model-name", "tiny", "--port", "0", *ENGINE, *arguments, **environment)
        servers.append(server)
        return server.ready() if wait else server

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def server(start):
    """A server that the tests of a module share."""
    return start()
