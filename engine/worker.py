"""The engine process: `python -m llmctl.engine.worker ADDRESS EPOCH CONFIG`, started by ProcessClient.

It ends when told to, when its model cannot be loaded, and when the process that started it is gone. Ctrl-C is blocked
by whoever starts it, and they tell it to stop.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

import msgspec
import zmq

from ..kernels.errors import LlmctlError
from .assemble import assemble, find_model
from .config import EngineConfig
from .loop import run_loop
from .messages import Command, Event, Failed, Loading, Opened, Ready, Shutdown

PARENT_CHECK_MS = 1000


class Channel:
    """The worker's end of the socket: commands in, events out. `closed` once the other side is gone."""

    def __init__(self, address: str) -> None:
        self._parent = os.getppid()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)

    def emit(self, event: Event) -> None:
        """Send one event."""
        self._socket.send(self._encoder.encode(event))

    def tell(self, description: str, done: int, total: int) -> None:
        """Send how far loading has come."""
        self.emit(Loading(description, done, total))

    def inbox(self, wait: bool) -> Iterable[Command]:
        """The commands that have come; waits for one if asked. A lost parent reads as Shutdown."""
        while not self._socket.poll(PARENT_CHECK_MS if wait else 0):
            if os.getppid() != self._parent:
                return [Shutdown()]
            if not wait:
                return []
        commands: list[Command] = []
        while self._socket.poll(0):
            commands.append(self._decoder.decode(self._socket.recv()))
        return commands

    def close(self) -> None:
        """Send what is queued and leave."""
        self._socket.close()
        zmq.Context.instance().term()


def main(address: str, epoch: int, settings: str) -> int:
    """Load, serve, and return the exit code."""
    channel = Channel(address)
    try:
        config = msgspec.json.decode(settings, type=EngineConfig)
        model = find_model(config, channel.tell)
        channel.emit(Opened(str(model.folder)))
        engine, info = assemble(config, model, epoch=epoch, progress=channel.tell)
        channel.emit(Ready(info))
        run_loop(engine, epoch, channel.inbox, channel.emit)
        engine.close()
    except LlmctlError as error:
        channel.emit(Failed(type(error).__name__, error.message, error.hint))
        return 1
    except Exception as error:
        channel.emit(Failed(type(error).__name__, str(error), ""))
        raise
    finally:
        channel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
