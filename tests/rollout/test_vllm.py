"""vLLM: weights and seeds of an engine, a server that is dead, hangs or refuses, and the ratio in the loss."""

import contextlib
import copy
import json
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import requests
import torch
import transformers
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from trl.generation import vllm_client
from trl.generation.vllm_client import VLLMClient

from credit_trl.rollout import vllm
from credit_trl.rollout.vllm import PolicyGeneration, VLLMServerError, WatchedClient, merged_weights
from credit_trl.teacher.models import make_teacher
from dense import logps
from tables import tables_of

TABLES = tables_of(__file__)


def adapted(make_model, kind, dtype):
    """A policy with a trained adapter and a teacher adapter with other weights."""
    torch.manual_seed(1)
    model = get_peft_model(make_model(dtype=dtype), LoraConfig(r=4, lora_alpha=8, **TABLES["adapters"][kind]))
    teacher = make_teacher("ema", model, Accelerator(cpu=True))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
        for weight in teacher.named_weights().values():
            weight += 1.0
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", TABLES["adapters"])
def test_engine_gets_merged_adapter_and_model_is_unchanged(make_model, kind, dtype):
    model = adapted(make_model, kind, dtype)
    state_before = {name: weight.clone() for name, weight in model.state_dict().items()}
    sent = {name: weight.clone() for name, weight in merged_weights(model)}
    state_after = model.state_dict()
    assert all(torch.equal(state_after[name], weight) for name, weight in state_before.items())

    plain = copy.deepcopy(model)
    plain.delete_adapter("teacher")
    expected = dict(plain.merge_and_unload().named_parameters())
    assert sent.keys() == expected.keys() == dict(make_model().named_parameters()).keys()
    assert any(not torch.equal(sent[n], p) for n, p in make_model(dtype=dtype).named_parameters())
    for name, weight in expected.items():
        torch.testing.assert_close(sent[name], weight.detach(), rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_each_adapted_parameter_of_a_module_is_sent_merged():
    """PEFT adapts fused experts with nested wrappers, one per parameter."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
    config = transformers.Qwen3MoeConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, **sizes
    )
    plain = transformers.AutoModelForCausalLM.from_config(config)
    model = get_peft_model(copy.deepcopy(plain), LoraConfig(r=2, init_lora_weights=False, **TABLES["experts"]))
    state_before = {name: weight.clone() for name, weight in model.state_dict().items()}
    sent = {name: weight.clone() for name, weight in merged_weights(model)}
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in state_before.items())
    expected, plain_parameters = dict(model.merge_and_unload().named_parameters()), dict(plain.named_parameters())
    assert sent.keys() == plain_parameters.keys()
    for name, weight in sent.items():
        torch.testing.assert_close(weight, expected[name].detach(), rtol=0, atol=1e-7)
        assert torch.equal(weight, plain_parameters[name]) == (not any(part in name for part in ("q_proj", "experts")))


@pytest.mark.parametrize(("process", "seed"), [(0, 11), (1, 11), (2, 12), (3, 12)])
def test_processes_of_an_engine_share_a_random_stream(process, seed):
    accelerator = SimpleNamespace(process_index=process)
    engine = SimpleNamespace(mode="colocate", tensor_parallel_size=2, accelerator=accelerator)
    PolicyGeneration.adopt(engine, seed=11)
    assert torch.initial_seed() == seed


PATIENCE = 0.6
CHOICE = {"prompt_token_ids": [1], "token_ids": [2, 3], "logprobs": None}


class FakeServer(ThreadingHTTPServer):
    """HTTP server with canned answers: path -> (status, body), or seconds to wait before a completion."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = {"/health": (200, {})}
        self.closing = threading.Event()  # ends handlers that wait
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def die(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        answer = self.server.answers.get(self.path, (200, {}))
        if not isinstance(answer, tuple):
            self.server.closing.wait(answer)
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
    monkeypatch.setattr(vllm, "POLL_SECONDS", 0.05)
    running = FakeServer()
    yield running
    running.closing.set()
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


LENGTH, NOISE = 128, 0.08  # as .02 nats a token over 2,048 tokens: the ratio of a completion spreads by .9 nats


def noisy_rollouts(prompts, trainer, spread=NOISE):
    """Long completions with log-probabilities of an engine whose mean ratio is 1."""
    is_training = trainer.model.training
    generator = torch.Generator().manual_seed(0)
    completions = torch.randint(97, 122, (len(prompts), LENGTH), generator=generator).tolist()
    ids = [trainer.processing_class(prompt[-1]["content"])["input_ids"] for prompt in prompts]
    logprobs = []
    for prompt_ids, completion in zip(ids, completions, strict=True):
        noise = spread * torch.randn(LENGTH, generator=generator) + spread**2 / 2
        logprobs.append(
            (logps(trainer.model.eval(), prompt_ids, completion)[range(LENGTH), completion] + noise).tolist()
        )
    trainer.model.train(is_training)
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": logprobs}


@pytest.fixture
def trained(make_trainer, no_engine):
    def train(rollouts=noisy_rollouts, **options):
        sizes = {"max_steps": 1, "per_device_train_batch_size": 32, "max_completion_length": LENGTH}
        trainer = make_trainer(rollout_func=rollouts, **{"use_vllm": True, **sizes, **options})
        trainer.vllm_generation.sync_weights = lambda: None
        trainer.train()
        return trainer

    return train


def test_the_engine_gets_the_weights_of_a_second_training_and_of_the_best_model(trained, dataset):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_strategy": "epoch"}
    best["eval_strategy"] = "epoch"
    for options, call in (({}, "train"), ({"eval_rows": dataset, **best}, "evaluate")):
        loaded = []
        trainer = trained(**options)
        trainer.vllm_generation.sync_weights = partial(loaded.append, call)
        getattr(trainer, call)()
        assert loaded == [call]


@pytest.mark.parametrize(("mode", "lowest", "highest"), TABLES["medians"])
def test_median_weight_of_a_token_under_an_engine_with_noise(trained, mode, lowest, highest):
    options = {} if mode is None else {"vllm_importance_sampling_mode": mode}
    history = trained(**options).state.log_history
    assert lowest < history[0]["sampling/importance_sampling_ratio/median"] < highest


UPDATES = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
UPDATES |= dict.fromkeys(("steps_per_generation", "max_steps"), 2)


@pytest.mark.filterwarnings("ignore:The log-probabilities of the sampled")
def test_the_engines_log_probabilities_serve_as_the_old_ones(trained):
    """Without noise the loss of both updates is that of a pass of the policy, which is not run."""
    exact = partial(noisy_rollouts, spread=0.0)
    losses, passes = {}, {}
    for corrects in (True, False):
        trainer = trained(exact, vllm_importance_sampling_correction=corrects, **UPDATES)
        rows = [row for row in trainer.state.log_history if "loss" in row]
        losses[corrects] = [(row["loss"], row["grad_norm"]) for row in rows]
        passes[corrects] = "credit/seconds_old_logps" in rows[0]
    torch.testing.assert_close(torch.tensor(losses[False]), torch.tensor(losses[True]), rtol=1e-5, atol=1e-6)
    assert passes == {True: True, False: False}


@pytest.mark.filterwarnings("ignore:The (log-probabilities of the sampled|engine's log-probabilities)")
def test_the_ratio_to_the_engine_is_bounded_and_1_where_it_reported_nothing(trained):
    def rollouts(prompts, trainer):
        generated = noisy_rollouts(prompts, trainer, spread=0.5)
        for logprobs in generated["logprobs"]:
            logprobs[0] = None
        return generated

    trainer = trained(rollouts, vllm_importance_sampling_correction=False, **UPDATES)
    row = next(row for row in trainer.state.log_history if "loss" in row)
    assert 0.8 < row["sampling/importance_sampling_ratio/median"] < 0.97  # exp(−.5² / 2) = .88
    assert row["sampling/importance_sampling_ratio/mean"] < 1.0  # above 2 it is cut
    assert row["sampling/frac_missing_logps"] == pytest.approx(1 / LENGTH)
