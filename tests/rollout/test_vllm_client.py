"""vLLM client: a dead, hanging or refusing server raises an error, a slow one is waited for."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests
from trl.generation import vllm_client
from trl.generation.vllm_client import VLLMClient

from credit_trl.rollout import vllm_client as vllm_server
from credit_trl.rollout.vllm_client import VLLMServerError, WatchedClient, await_server

PATIENCE = 0.6
CHOICE = {"prompt_token_ids": [1], "token_ids": [2, 3], "logprobs": None}


class FakeServer(ThreadingHTTPServer):
    """HTTP server with canned answers: path -> (status, body), or seconds to wait before a completion."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = {"/health": (200, {})}
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def die(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        answer = self.server.answers.get(self.path, (200, {}))
        if not isinstance(answer, tuple):
            time.sleep(answer)
            answer = (200, {"choices": [CHOICE]})
        body = json.dumps(answer[1]).encode()
        self.send_response(answer[0])
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # the client has disconnected
            super().handle()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(vllm_server, "POLL_SECONDS", 0.05)
    running = FakeServer()
    yield running
    running.die()


@pytest.fixture
def client(server) -> WatchedClient:
    connected = VLLMClient.__new__(VLLMClient)  # its constructor needs vLLM
    connected.session, connected.base_url, connected.model = requests.Session(), server.url, "tiny"
    connected.communicator, connected._updating_weights = None, False
    return WatchedClient.adopt(connected, patience=PATIENCE)


def error_message(server: FakeServer, call) -> str:
    with pytest.raises(VLLMServerError) as caught:
        call()
    assert server.url in str(caught.value)
    assert "resume_from_checkpoint=True" in str(caught.value)
    return str(caught.value)


def test_client_waits_for_healthy_server_beyond_timeout(server, client):
    server.answers["/v1/completions"] = 3 * PATIENCE
    assert client.generate([[1]])["completion_ids"] == [[2, 3]]


@pytest.mark.parametrize("health", ["dies", 30.0, (503, {}), (500, {"error": "EngineDeadError"})])
def test_client_raises_after_the_timeout(server, client, health):
    server.answers["/v1/completions"] = 30.0
    if health == "dies":
        threading.Timer(0.3, server.die).start()
    else:
        server.answers["/health"] = health
    started = time.monotonic()
    message = error_message(server, lambda: client.generate([[1]]))
    assert f"has not answered for {PATIENCE:g} s" in message
    assert "while generating" in message
    assert time.monotonic() - started >= PATIENCE


@pytest.mark.parametrize(
    ("status", "reason"), [(400, "This model's maximum context length is 512 tokens."), (500, "out of memory")]
)
def test_client_error_quotes_server_response(server, client, status, reason):
    server.answers["/v1/completions"] = (status, {"error": {"message": reason}})
    message = error_message(server, lambda: client.generate([[1]]))
    assert str(status) in message
    assert reason in message


@pytest.mark.parametrize("answer", [(500, {"error": "not initialized"}), 30.0])
def test_refused_weight_update_ends_blocked_broadcast(server, client, monkeypatch, answer):
    finished = threading.Event()
    monkeypatch.setattr(vllm_client, "_HAS_STATEFUL_TRAINER_ENGINE", True)
    monkeypatch.setattr(
        vllm_client, "packed_nccl_broadcast_producer", lambda **_: finished.wait(timeout=60), raising=False
    )
    server.answers["/update_weights"] = answer
    metadata = [("weight", "float32", [1])]
    try:
        message = error_message(server, lambda: client.update_named_params(metadata, iter([])))
    finally:
        finished.set()
    assert "failed at /update_weights" in message


def test_await_server_waits_until_healthy(server):
    server.answers["/health"] = (503, {})
    threading.Timer(0.4, server.answers.update, [{"/health": (200, {})}]).start()
    started = time.monotonic()
    await_server(server.url, timeout=10.0)
    assert time.monotonic() - started > 0.3


@pytest.mark.parametrize("health", [30.0, (503, {})])
def test_await_server_error_names_start_command(server, health):
    server.answers["/health"] = health
    with pytest.raises(VLLMServerError, match=rf"{server.url} did not answer within 0.5 s.*vllm serve"):
        await_server(server.url, timeout=0.5)
