"""A server in the shape of llama-server, for tests: `python fake_llama.py LOG [options of the real one]`.

It answers at once, as many tokens as asked, and writes its arguments and the bodies of requests to LOG, a line each.
MODE (an option of the fake only) makes it misbehave: `die`, `slow-start`, `short`, `error`, `dies-later`, `child`.
"""

import http.server
import json
import os
import subprocess
import sys

log, *arguments = sys.argv[1:]
mode = arguments[arguments.index("--mode") + 1] if "--mode" in arguments else ""


def write(value):
    with open(log, "a") as file:
        file.write(json.dumps(value) + "\n")


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.send_response(503 if mode == "never-ready" else 200)
        self.end_headers()
        self.wfile.write(b"{}")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        write(body)
        if mode == "dies-later" and len(body["prompt"]) > 100:
            os._exit(7)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if mode == "error":
            self.wfile.write(b'error: {"code": 500, "message": "no slot"}\n\n')
            return
        count = body["n_predict"] - (mode == "short")
        for number in range(count):
            self.event({"content": "x", "tokens": [number], "stop": False})
        self.event(
            {
                "content": "",
                "tokens": [],
                "stop": True,
                "tokens_predicted": count,
                "tokens_evaluated": len(body["prompt"]),
                "timings": {"cache_n": 0},
            }
        )

    def event(self, value):
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")


if mode == "die":
    sys.exit("cannot load the model: no such file")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) if mode == "child" else None
write({"arguments": arguments, "pid": os.getpid(), "child": child and child.pid})
port = int(arguments[arguments.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
