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
from trl.generation.vllm_client import VLLMClient

from credit_trl.rollout.deadline import call_in_thread

POLL_SECONDS = 1.0
CONNECT_SECONDS = 5.0

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
        """Convert a connected client; `/health` or a weight update may stay unanswered for `patience` seconds."""
        watched = cls.__new__(cls)
        vars(watched).update(vars(client))
        watched.patience = patience
        watched.failure = None  # of the last request that failed
        return watched

    def generate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._watch("generating", lambda: super(WatchedClient, self).generate(*args, **kwargs))

    def update_named_params(self, *args: Any, **kwargs: Any) -> None:
        self._watch("receiving weights", lambda: super(WatchedClient, self).update_named_params(*args, **kwargs))

    def reset_prefix_cache(self) -> None:
        self._post(f"{self.base_url}/reset_prefix_cache")

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        """Send a request. One that changes the server's state has a timeout and is not retried."""
        endpoint = url.removeprefix(self.base_url)
        try:
            if "/v1/" in endpoint:  # completions, which take any time
                return super()._post(url, **kwargs)
            response = requests.post(url, timeout=(CONNECT_SECONDS, self.patience), **kwargs)
            if response.status_code != 200:
                raise requests.HTTPError(f"{response.status_code}: {response.text[:500]}")
        except Exception as error:  # of `requests`, or TRL's for another status
            self.failure = VLLMServerError(self.base_url, f"failed at {endpoint} ({error})")
            raise self.failure from error
        return response.json() if response.content else {}

    def _watch(self, activity: str, work: Callable[[], Any]) -> Any:
        outcome = call_in_thread("vllm-server-call", torch.no_grad()(work))  # torch stores the grad mode per thread
        last_answer = time.monotonic()
        while not wait([outcome], timeout=POLL_SECONDS).done:
            if self.failure is not None:  # the broadcast of weights still waits for its receiver
                raise self.failure
            silence = _ask_health(self.base_url, min(CONNECT_SECONDS, self.patience))
            if silence is None:
                last_answer = time.monotonic()
            if time.monotonic() - last_answer >= self.patience:
                problem = f"has not answered for {self.patience:g} s ({silence}) while {activity}"
                raise VLLMServerError(self.base_url, problem)
        return outcome.result()


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


def _ask_health(url: str, timeout: float) -> str | None:
    try:
        response = requests.get(f"{url}/health", timeout=timeout)
    except requests.RequestException as error:
        return str(error)
    return None if response.status_code == 200 else f"/health returned {response.status_code}"
