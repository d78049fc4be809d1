"""The engine process: `python -m llmctl.engine.worker`, started by `early.py`, with its Orders on stdin.

It ends when told to, when its model cannot be loaded, when there are no orders, and when the process that started it is
gone. Ctrl-C is blocked by whoever starts it, and they tell it to stop.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable

import msgspec
import zmq

from ..kernels.errors import LlmctlError
from .find import find_model
from .messages import Command, Event, Failed, Loading, Opened, Ready, Shutdown
from .process import Orders

PARENT_CHECK_MS = 1000


class Channel:
    """The worker's end of the socket: commands in, events out. Ends the process once the other side is gone."""

    def __init__(self, address: str, parent: int) -> None:
        self._parent = parent
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)

    def emit(self, event: Event) -> None:
        """Send one event; waits while the other side reads none."""
        encoded = self._encoder.encode(event)
        while True:
            try:
                self._socket.send(encoded, zmq.NOBLOCK)
                return
            except zmq.Again:
                self.end_if_alone()
                self._socket.poll(PARENT_CHECK_MS, zmq.POLLOUT)

    def tell(self, description: str, done: int, total: int) -> None:
        """Send how far loading has come, if anybody is left to load for."""
        self.end_if_alone()
        self.emit(Loading(description, done, total))

    def end_if_alone(self) -> None:
        """End without a word if the parent is gone. By SIGTERM, which whatever is being built clears itself away for.

        Any thread may ask this, and an exception would end that one alone.
        """
        if self._is_alone():
            os.kill(os.getpid(), signal.SIGTERM)

    def inbox(self, wait: bool) -> Iterable[Command]:
        """The commands that have come; waits for one if asked. A lost parent reads as Shutdown."""
        while not self._socket.poll(PARENT_CHECK_MS if wait else 0):
            if self._is_alone():
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

    def _is_alone(self) -> bool:
        """Whether another process has inherited this one: the parent is gone, however early that was."""
        return os.getppid() != self._parent


def main() -> int:
    """Load, serve, and return the exit code."""
    written = sys.stdin.buffer.read()
    if not written:  # whoever started it had no use for it
        return 0
    orders = msgspec.json.decode(written, type=Orders)
    channel = Channel(orders.address, orders.parent)
    channel.end_if_alone()
    try:
        model = find_model(orders.config, channel.tell)
        channel.emit(Opened(str(model.folder)))
        from .assemble import assemble  # a good part of all imports, beside which a server parses the tokenizer
        from .loop import run_loop

        engine, info = assemble(orders.config, model, epoch=orders.epoch, progress=channel.tell)
        channel.emit(Ready(info))
        run_loop(engine, orders.epoch, channel.inbox, channel.emit)
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
    sys.exit(main())
