"""vLLM client with a health watchdog.

TRL waits for its server without a limit: requests have no timeout, because a batch of long completions may take any
time, and a weight broadcast to a dead server never returns. This client runs each call in a thread and meanwhile polls
`/health`, which the server answers during its work. If the answer fails to come, the run ends with an error that names
the server.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import requests
import torch
from requests.adapters import HTTPAdapter
from trl.generation.vllm_client import VLLMClient

from credit_trl.rollout.threads import call_in_thread

POLL_SECONDS = 1.0
CONNECT_SECONDS = 5.0
# Consecutive refused connections after which the server counts as gone; one may be a brief overload.
REFUSALS = 2
# Endpoints that answer quickly or not at all. They are not retried, because they change the server's state.
CONTROL_ENDPOINTS = ("start_weight_update", "update_weights", "finish_weight_update", "reset_prefix_cache")

_START = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs --max-logprobs -1 "
    """--weight-transfer-config '{"backend": "nccl"}'"""
)
_RESTART = (
    "See the server's log (running out of memory is the usual cause), restart it with the same model and flags, and "
    "resume from the last checkpoint: `trainer.train(resume_from_checkpoint=True)`, or "
    "`trl credit --resume_from_checkpoint latest`."
)


class VLLMServerError(ConnectionError):
    """The vLLM server is gone, does not answer, or refused a request, as `problem` says."""

    def __init__(self, url: str, problem: str, fix: str = _RESTART) -> None:
        super().__init__(f"The vLLM server at {url} {problem}. {fix}")


class WatchedClient(VLLMClient):
    """TRL's client with calls that raise [`VLLMServerError`] when the server fails, instead of waiting forever."""

    @classmethod
    def adopt(cls, client: VLLMClient, patience: float) -> WatchedClient:
        """Convert a connected client; `/health` or a control request may stay unanswered for `patience` seconds."""
        watched = cls.__new__(cls)
        vars(watched).update(vars(client))
        watched.patience = patience
        watched.control = _ControlAdapter(patience)
        for endpoint in CONTROL_ENDPOINTS:
            watched.session.mount(f"{watched.base_url}/{endpoint}", watched.control)
        return watched

    def generate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._watch("generating", lambda: super(WatchedClient, self).generate(*args, **kwargs))

    def update_named_params(self, *args: Any, **kwargs: Any) -> None:
        self._watch("receiving weights", lambda: super(WatchedClient, self).update_named_params(*args, **kwargs))

    def reset_prefix_cache(self) -> None:
        self._watch("clearing its cache", lambda: super(WatchedClient, self).reset_prefix_cache())

    def _watch(self, activity: str, work: Callable[[], Any]) -> Any:
        outcome = call_in_thread("vllm-server-call", torch.no_grad()(work))  # torch stores the grad mode per thread
        health = _Health(self.base_url, self.patience)
        while not wait([outcome], timeout=POLL_SECONDS).done:
            # A failed control request ends the update while the broadcast still waits for its receiver.
            problem = self.control.failure or health.problem()
            if problem is not None:
                raise VLLMServerError(self.base_url, f"{problem} while {activity}")
        try:
            return outcome.result()
        except requests.RequestException as error:
            raise VLLMServerError(self.base_url, f"failed while {activity} ({error})") from error
        except Exception as error:
            if type(error) is Exception:  # TRL raises it for a status other than 200
                raise VLLMServerError(self.base_url, f"failed while {activity} ({error})") from error
            raise


def await_server(url: str, timeout: float) -> None:
    """Wait until a server answers `/health`.

    Raises:
        VLLMServerError: it did not answer within `timeout` seconds.
    """
    started = time.monotonic()
    while (problem := _ask_health(url, min(CONNECT_SECONDS, max(timeout, 1.0)))) is not None:
        if time.monotonic() - started >= timeout:
            fix = f"Start it with: {_START}; or correct `vllm_server_host` and `vllm_server_port`, or the base URL."
            raise VLLMServerError(url, f"did not answer within {timeout:g} s ({problem})", fix)
        time.sleep(min(POLL_SECONDS, timeout))


class _ControlAdapter(HTTPAdapter):
    """HTTP adapter with a timeout that stores the last failure."""

    def __init__(self, patience: float) -> None:
        super().__init__(max_retries=0)
        self.patience = patience
        self.failure: str | None = None

    def send(self, request: requests.PreparedRequest, **kwargs: Any) -> requests.Response:
        kwargs["timeout"] = (CONNECT_SECONDS, self.patience)
        try:
            response = super().send(request, **kwargs)
        except requests.RequestException as error:
            self.failure = f"did not answer {request.path_url} ({error})"
            raise
        if response.status_code >= 400:
            self.failure = f"refused {request.path_url} ({response.status_code}: {response.text[:500]})"
        return response


class _Health:
    """State of a series of `/health` requests."""

    def __init__(self, url: str, patience: float) -> None:
        self.url = url
        self.patience = patience
        self.last_answer = time.monotonic()
        self.refusals = 0

    def problem(self) -> str | None:
        """Send one request. None if the server answers, or if its silence is shorter than `patience`."""
        problem = _ask_health(self.url, min(CONNECT_SECONDS, self.patience))
        if problem is None:
            self.last_answer = time.monotonic()
            self.refusals = 0
            return None
        self.refusals = self.refusals + 1 if "refused" in problem.lower() else 0
        if self.refusals >= REFUSALS:
            return "is gone: it refuses connections"
        if time.monotonic() - self.last_answer >= self.patience:
            return f"has not answered for {self.patience:g} s ({problem})"
        return None


def _ask_health(url: str, timeout: float) -> str | None:
    try:
        response = requests.get(f"{url}/health", timeout=timeout)
    except requests.RequestException as error:
        return str(error)
    return None if response.status_code == 200 else f"/health returned {response.status_code}"
