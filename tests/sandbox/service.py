"""A local service in the style of Sandbox Fusion that runs programs and can misbehave."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PROBE = "print(6 * 7)"


class Service(ThreadingHTTPServer):
    """Runs the code of each request in a fresh interpreter, unless `misbehave` is set to answer in its place."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict] = []
        self.misbehave = None
        self.closing = threading.Event()  # ends handlers that wait
        self.url = f"http://127.0.0.1:{self.server_port}/service"

    def handle_error(self, request, client_address) -> None:
        """Ignore clients that disconnect at their deadline."""


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append({**body, "path": self.path})
        if self.server.misbehave is not None and PROBE not in body["code"]:
            self.server.misbehave(self, body)
            return
        self.answer(200, run_code(body))

    def answer(self, status: int, body: dict) -> None:
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""


def run_code(body: dict) -> dict:
    started = time.monotonic()
    command = [sys.executable, "-I", "-S", "-X", "utf8", "-c", body["code"]]
    try:
        run_options = {"input": body["stdin"].encode(), "timeout": body["run_timeout"]}
        run = subprocess.run(command, capture_output=True, check=False, **run_options)
    except subprocess.TimeoutExpired:
        result = {"status": "TimeLimitExceeded", "execution_time": body["run_timeout"], "return_code": None}
        return {"status": "Failed", "message": "", "run_result": {**result, "stdout": "", "stderr": ""}}
    result = {
        "status": "Finished",
        "execution_time": time.monotonic() - started,
        "return_code": run.returncode,
        "stdout": run.stdout.decode(errors="replace"),
        "stderr": run.stderr.decode(errors="replace"),
    }
    return {"status": "Success" if run.returncode == 0 else "Failed", "message": "", "run_result": result}


@contextmanager
def running_service() -> Iterator[Service]:
    with Service() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield running
        running.closing.set()
        running.shutdown()
        thread.join()
