"""Real servers: `llmctl serve` in a process of its own, with a tiny random model behind it."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import openai
import psutil

DEADLINE_S = 300  # for what must happen sooner or later; the machine may stand still meanwhile
CHAT = "/v1/chat/completions"
LONG = {"max_tokens": 200, "ignore_eos": True, "seed": 3}
ENGINE = ("--max-model-len", "256", "--num-gpu-blocks-override", "128", "--block-size", "8", "--threads", "1")


def eventually(condition, what="the condition"):
    """The condition's value as soon as it is true."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not come true"
        time.sleep(0.01)
    return value


class Server:
    """A running `llmctl serve`, its address, and what it has written to stderr."""

    def __init__(self, *arguments, **environment):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llmctl", "serve", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
            env={**os.environ, **environment},
        )  # fmt: skip
        self.stderr = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""

    def _read(self):
        for line in self.process.stderr:
            self.stderr += line

    def ready(self):
        """Wait until requests are served."""
        self.url = self.process.stdout.readline().strip()
        assert self.url, self.end()
        return self

    @property
    def engine(self):
        """The engine's process."""
        return psutil.Process(self.process.pid).children()[0]

    @contextlib.contextmanager
    def frozen_engine(self):
        """The engine stands still meanwhile, so that what is open stays open."""
        engine = self.engine
        engine.suspend()
        try:
            yield engine
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.resume()

    def http(self, **options):
        return httpx.Client(base_url=self.url, timeout=DEADLINE_S, **options)

    def openai(self, **options):
        settings = {"base_url": self.url + "/v1", "api_key": "none", "max_retries": 0, "timeout": DEADLINE_S}
        return openai.OpenAI(**{**settings, **options})

    def metrics(self):
        """The value of every metric without labels of its own."""
        text = httpx.get(self.url + "/metrics", timeout=DEADLINE_S).text
        found = re.findall(r'^llmctl:(\w+)\{model_name="[^"]*"\} (\S+)$', text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    def health(self):
        return httpx.get(self.url + "/health", timeout=DEADLINE_S).json()

    def idle(self):
        """Wait until nothing runs, and return the metrics then."""

        def metrics():
            now = self.metrics()
            return now if now["num_requests_running"] == now["num_requests_waiting"] == 0 else None

        return eventually(metrics, "idleness")

    def logged(self, pattern):
        """Wait for a line on stderr."""
        return eventually(lambda: re.search(pattern, self.stderr), f"`{pattern}` in the log")

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def end(self):
        """Wait for the end; (exit code, stderr)."""
        code = self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        return code, self.stderr

    def close(self):
        children = psutil.Process(self.process.pid).children() if self.process.poll() is None else []
        for process in (self.process, *children):
            process.kill()
        self.process.wait()
        self.process.stdout.close()


def ask(server, text, **change):
    """An open connection on which this was asked."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=DEADLINE_S)
    body = {"messages": [{"role": "user", "content": text}], **LONG, **change}
    connection.request("POST", CHAT, json.dumps(body))
    return connection
