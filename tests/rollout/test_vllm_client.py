"""A vLLM server that leaves, hangs or refuses is named in time; one that is only slow is waited for."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests
from trl.generation import vllm_client
from trl.generation.vllm_client import VLLMClient

from credit_trl.rollout import vllm as generation
from credit_trl.rollout import vllm_client as vllm_server
from credit_trl.rollout.vllm_client import VLLMServerError, WatchedClient, await_server

PATIENCE = 0.6
CHOICE = {"prompt_token_ids": [1], "token_ids": [2, 3], "logprobs": None}


class FakeServer(ThreadingHTTPServer):
    """Answers what `answers` says: path → (status, body) at once, or → a number of seconds to wait before {}."""

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
        """Quiet."""

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # a client that gave up
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


def named(server: FakeServer, call, *, within: float = 5.0) -> str:
    started = time.monotonic()
    with pytest.raises(VLLMServerError) as caught:
        call()
    assert time.monotonic() - started < within
    assert server.url in str(caught.value)
    assert "resume_from_checkpoint=True" in str(caught.value)
    return str(caught.value)


def test_an_answer_is_passed_on(server, client):
    server.answers["/v1/completions"] = (200, {"choices": [CHOICE]})
    assert client.generate([[1]])["completion_ids"] == [[2, 3]]


def test_a_server_that_is_busy_for_longer_than_the_timeout_is_waited_for(server, client):
    server.answers["/v1/completions"] = 3 * PATIENCE
    assert client.generate([[1]])["completion_ids"] == [[2, 3]]


def test_a_server_that_dies_is_gone_at_once(server, client):
    server.answers["/v1/completions"] = 30.0
    threading.Timer(0.3, server.die).start()
    assert "is gone: it refuses connections while generating" in named(server, lambda: client.generate([[1]]))


@pytest.mark.parametrize("health", [30.0, (503, {}), (500, {"error": "EngineDeadError"})])
def test_a_server_that_hangs_or_whose_engine_is_dead_is_named_after_the_timeout(server, client, health):
    server.answers.update({"/v1/completions": 30.0, "/health": health})
    started = time.monotonic()
    said = named(server, lambda: client.generate([[1]]))
    assert f"has not answered for {PATIENCE:g} s" in said
    assert time.monotonic() - started >= PATIENCE


@pytest.mark.parametrize(
    ("status", "reason"), [(400, "This model's maximum context length is 512 tokens."), (500, "out of memory")]
)
def test_a_refusal_is_quoted_with_the_servers_name(server, client, status, reason):
    server.answers["/v1/completions"] = (status, {"error": {"message": reason}})
    said = named(server, lambda: client.generate([[1]]))
    assert str(status) in said
    assert reason in said


@pytest.mark.parametrize("answer", [(500, {"error": "not initialized"}), 30.0])
def test_refused_weights_end_the_update_though_the_broadcast_never_does(server, client, monkeypatch, answer):
    finished = threading.Event()
    monkeypatch.setattr(vllm_client, "_HAS_STATEFUL_TRAINER_ENGINE", True)
    monkeypatch.setattr(
        vllm_client, "packed_nccl_broadcast_producer", lambda **_: finished.wait(timeout=60), raising=False
    )
    server.answers["/update_weights"] = answer
    metadata = [("weight", "float32", [1])]
    try:
        said = named(server, lambda: client.update_named_params(metadata, iter([])))
    finally:
        finished.set()
    assert "/update_weights" in said
    assert "while receiving weights" in said


def test_an_error_that_is_not_the_servers_is_left_as_it_is(server, client):
    def unreadable():
        raise ValueError("no such prompt")
        yield

    with pytest.raises(ValueError, match="no such prompt"):
        client._watch("generating", lambda: next(unreadable()))


def test_a_server_is_waited_for_until_it_is_up(server):
    server.answers["/health"] = (503, {})
    threading.Timer(0.4, server.answers.update, [{"/health": (200, {})}]).start()
    started = time.monotonic()
    await_server(server.url, timeout=10.0)
    assert 0.3 < time.monotonic() - started < 5.0


@pytest.mark.parametrize("health", [30.0, (503, {})])
def test_a_server_that_does_not_come_up_is_named_with_the_command_that_starts_one(server, health):
    server.answers["/health"] = health
    with pytest.raises(VLLMServerError, match=rf"{server.url} did not answer within 0.5 s.*vllm serve"):
        await_server(server.url, timeout=0.5)


def test_a_run_whose_server_is_missing_ends_before_anything_is_loaded(make_config, monkeypatch):
    monkeypatch.setattr(generation, "is_vllm_available", lambda: True)
    with socket.socket() as taken:  # bound and not listening: nobody answers there
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        options = {"use_vllm": True, "vllm_mode": "server", "vllm_server_timeout": 0.2}
        config = make_config(**options, vllm_server_host="127.0.0.1", vllm_server_port=port)
        with pytest.raises(VLLMServerError, match=f"http://127.0.0.1:{port} did not answer within 0.2 s"):
            generation.await_engine(config)


@pytest.mark.parametrize("method", ["generate", "update_named_params", "reset_prefix_cache", "_post"])
def test_trl_still_has_what_is_watched(method):
    assert callable(getattr(VLLMClient, method))
