"""A small training run in its own process, with a configurable point at which it fails.

The process is forked from a server that has imported all modules, so that a run only costs its steps.
"""

import functools
import hashlib
import json
import math
import os
import resource
import signal
import socket
import threading
import time
import tomllib
import urllib.request
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import requests
import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from trl.generation.vllm_client import VLLMClient

import tiny
from credit_trl import CreditConfig, CreditTrainer
from credit_trl.cli.preemption import SaveOnSigterm
from credit_trl.lab.report import ReportCallback
from credit_trl.rollout import vllm
from credit_trl.rollout.verdict import Verdict
from credit_trl.training import checkpoints
from distributed import cpu_fsdp2

STEPS = 5
FINAL = "final.json"

FAULTS = tomllib.loads(Path(__file__).with_name("faults.toml").read_text("utf-8"))
SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "interrupt": signal.SIGINT}


@dataclass(frozen=True)
class Fault:
    """Fault of one process at one point, when `step` optimizer steps are done: a kill, unless `kind` says otherwise.

    Kinds: `"kill"` (SIGKILL), `"terminate"` (SIGTERM), `"interrupt"` (SIGINT), `"disk"` (files may not grow beyond
    64 kB, as on a full disk), `"service"` (the verifier's service dies), `"engine"` (a vLLM server stops answering),
    `"second"` (waits while another trainer starts), and `"nan gradient"`, `"nan loss"` and `"nan teacher"`.

    The checkpoint of step n is written when n steps are done; the rest of step n happens when n - 1 are.
    """

    point: str
    step: int
    rank: int = 0
    kind: str = "kill"


class Service(BaseHTTPRequestHandler):
    """A verifier's service: rewards texts of odd length."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(int(self.path[1:]) % 2).encode())

    def log_message(self, *_: object) -> None:
        """Log nothing."""


SERVICE: list[ThreadingHTTPServer] = []


def start_service() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    SERVICE.append(server)


def grade(text: str) -> float:
    if SERVICE:
        with urllib.request.urlopen(f"http://127.0.0.1:{SERVICE[0].server_port}/{len(text)}", timeout=20) as answer:
            return float(answer.read())
    return float(len(text) % 2)


def verdicts(completions, answer, **kwargs):
    return [Verdict(grade(c[-1]["content"]), f"The answer is {a}.") for c, a in zip(completions, answer, strict=True)]


def schedule(fault: Fault, trainer: CreditTrainer) -> None:
    """Patch the function at the fault's point so that the fault of a run happens there."""
    path, name, when, count = FAULTS["points"][fault.point]
    owner = resolve_name(path)
    original, calls = getattr(owner, name), []

    @functools.wraps(original)
    def call(*args, **kwargs):
        if trainer.state.global_step != fault.step:
            return original(*args, **kwargs)
        calls.append(None)
        if len(calls) == count and when == "half":
            halve(original, *args, **kwargs)
        if len(calls) == count and when in ("before", "half"):
            happen(fault.kind, trainer)
        result = original(*args, **kwargs)
        if len(calls) == count and when == "after":
            happen(fault.kind, trainer)
        return result

    setattr(owner, name, call)


def happen(kind: str, trainer: CreditTrainer) -> None:
    if kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[kind])
    elif kind == "disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
    elif kind == "service":
        SERVICE[0].shutdown()
        SERVICE[0].server_close()
    elif kind == "engine":
        wait_for_silent_engine()
    elif kind == "second":
        out = Path(trainer.args.output_dir)
        (out / "waits").touch()
        while not (out / "continues").exists():
            time.sleep(0.02)
    elif kind == "nan teacher":
        next(iter(trainer.teacher.named_weights().values())).data.view(-1)[0] = math.nan
    elif kind == "nan gradient":
        weight = next(p for p in trainer.model.parameters() if p.requires_grad)
        weight.register_hook(lambda grad: grad * math.nan)
    elif kind == "nan loss":
        compute = trainer._distillation_loss
        trainer._distillation_loss = lambda *args: compute(*args) * math.nan


def wait_for_silent_engine() -> None:
    """Ask a vLLM server that accepts connections and never answers, through the client of a run."""
    vllm.POLL_SECONDS = 0.05
    silent = socket.create_server(("127.0.0.1", 0))
    client = VLLMClient.__new__(VLLMClient)  # its constructor needs vLLM
    client.session, client.base_url = requests.Session(), f"http://127.0.0.1:{silent.getsockname()[1]}"
    client.model, client.communicator, client._updating_weights = "tiny", None, False
    vllm.WatchedClient.adopt(client, patience=0.5).generate([[1]])


def halve(write: Any, *args: Any, **kwargs: Any) -> None:
    """Write a file and truncate it, or start to remove the oldest checkpoint."""
    if write.__name__ == "remove_old_checkpoints":
        oldest = min(Path(args[0]).glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
        next(oldest.glob("*.safetensors")).unlink()
        return
    write(*args, **kwargs)
    path = Path(args[1])
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def run(folder: str, variant: str, fault: Fault | None, rank: int, processes: int, port: int) -> None:
    """Train from the last checkpoint, if there is one, and write digests of the final state into `final.json`."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    log = os.open(out / f"log_{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TRL_EXPERIMENTAL_SILENCE": "1"}
    if processes > 1:
        os.environ |= {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
        os.environ |= {name: str(processes) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    if "fsdp2" in variant:
        cpu_fsdp2.install()
    if "service" in variant:
        start_service()
    if "jumps" in variant:
        let_the_clock_jump(out)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    trainer = make_trainer(out, variant, processes)
    trainer.add_callback(SaveOnSigterm())
    assert trainer.accelerator.num_processes == processes
    assert any(isinstance(callback, ReportCallback) for callback in trainer.callback_handler.callbacks)
    if fault is not None and fault.rank == rank:
        schedule(fault, trainer)
    trainer.train(resume_from_checkpoint="latest")
    finals = digests(trainer)
    if rank == 0:
        (out / FINAL).write_text(json.dumps(finals))
    if dist.is_initialized():
        dist.barrier()


def let_the_clock_jump(out: Path) -> None:
    """Give each launch a clock that is hours ahead or behind, by its number, as on another host."""
    counter = out / "launches"
    number = int(counter.read_text()) + 1 if counter.exists() else 1
    counter.write_text(str(number))
    offset = (-1) ** number * 3600.0 * number
    clock, finish = time.time, checkpoints.finish

    def finish_at_the_time(unfinished: Path, finished: Path) -> None:
        finish(unfinished, finished)
        os.utime(finished, (time.time(), time.time()))

    time.time = lambda: clock() + offset
    checkpoints.finish = finish_at_the_time


def make_trainer(out: Path, variant: str, processes: int) -> CreditTrainer:
    """Twelve prompts, two per generation batch; half of the checkpoints lie inside a generation batch."""
    tokenizer = tiny.build_tokenizer()
    questions = [f"{a}+{b}=" for a in range(3) for b in range(4)]
    rows = [{"prompt": [{"role": "user", "content": q}], "answer": str(int(q[0]) + int(q[2]))} for q in questions]
    saving = {"save_steps": 100 if "rarely" in variant else 1, "save_total_limit": 2 if "jumps" in variant else 1}
    sizes = {"per_device_train_batch_size": 4 // processes, "max_steps": STEPS}
    options = FAULTS["options"] | FAULTS["variants"].get(variant, {})
    if "jumps" in variant:
        options["steps_per_generation"] = 3
    config = CreditConfig(str(out), **sizes, **saving, **options)
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    trainer_options = {"processing_class": tokenizer, "peft_config": adapter if "lora" in variant else None}
    return CreditTrainer(tiny.build_model(tokenizer), verdicts, config, Dataset.from_list(rows), **trainer_options)


def digests(trainer: CreditTrainer) -> dict[str, Any]:
    """Digests of the final state of a run, and its logged losses and rewards."""
    optimizer = trainer.optimizer.optimizer if hasattr(trainer.optimizer, "optimizer") else trainer.optimizer
    moments = [s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    teacher = trainer.teacher.named_weights() if trainer.credit_step else {}
    return {
        "weights": digest(p for _, p in sorted(trainer.accelerator.unwrap_model(trainer.model).named_parameters())),
        "teacher": digest(p for _, p in sorted(teacher.items())),
        "optimizer": digest(moments),
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "rewards": [row.get("reward") for row in trainer.state.log_history if "loss" in row],
        "step": trainer.state.global_step,
    }


def digest(tensors) -> str:
    hasher = hashlib.sha256()
    for tensor in tensors:
        gathered = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        hasher.update(gathered.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()
