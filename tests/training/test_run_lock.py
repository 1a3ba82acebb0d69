"""One trainer in a run directory: a second one is refused with the name of the first, a dead lock is taken over."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from credit_trl import CreditTrainer
from credit_trl.training import run_lock
from credit_trl.training.run_lock import LOCK_FILE, RunLockedError
from tiny import length_verdicts


@pytest.fixture
def other(tmp_path):
    """A living process on this host."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def write(folder, **fields):
    own = {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time(), "token": "x"}
    (folder / LOCK_FILE).write_text(json.dumps(own | fields))


def test_second_trainer_is_refused_with_host_process_and_start(make_model, make_config, tokenizer, dataset, tmp_path):
    second = []

    def rewards(completions, **kwargs):
        config = make_config(output_dir=str(tmp_path))
        trainer = CreditTrainer(make_model(), length_verdicts, config, dataset, processing_class=tokenizer)
        with pytest.raises(RunLockedError) as refused:
            trainer.train()
        second.append(str(refused.value))
        return [0.0] * len(completions)

    config = make_config(output_dir=str(tmp_path), max_steps=1)
    CreditTrainer(make_model(), rewards, config, dataset, processing_class=tokenizer).train()
    assert f"process {os.getpid()} on {socket.gethostname()}, started 20" in second[0]
    assert not (tmp_path / LOCK_FILE).exists()


def test_lock_of_a_process_that_lives_is_kept(tmp_path, other):
    write(tmp_path, pid=other.pid, started=psutil.Process(other.pid).create_time())
    with pytest.raises(RunLockedError, match=f"process {other.pid} on"), run_lock.run_lock(tmp_path):
        pass
    assert (tmp_path / LOCK_FILE).exists()


@pytest.mark.parametrize("case", ["killed", "number used again", "killed before it wrote"])
def test_lock_of_a_dead_process_is_taken_over_at_once(tmp_path, other, case):
    write(tmp_path, pid=other.pid, started=psutil.Process(other.pid).create_time() - 60 * (case != "killed"))
    if case == "killed":
        other.kill()
        other.wait()
    if case == "killed before it wrote":
        (tmp_path / LOCK_FILE).write_text("")
    with run_lock.run_lock(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("beats", [True, False])
def test_lock_of_another_host_lives_while_it_beats(tmp_path, monkeypatch, beats):
    monkeypatch.setattr(run_lock, "STALE", 1.0)
    write(tmp_path, host="node17", pid=1)
    ended = threading.Event()

    def beat():
        while not ended.wait(0.1):
            os.utime(tmp_path / LOCK_FILE)

    thread = threading.Thread(target=beat, daemon=True)
    if beats:
        thread.start()
        with pytest.raises(RunLockedError, match="process 1 on node17"), run_lock.run_lock(tmp_path):
            pass
        ended.set()
        thread.join()
    else:
        with run_lock.run_lock(tmp_path):
            pass


def test_holder_beats(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT", 0.05)
    with run_lock.run_lock(tmp_path):
        first = (tmp_path / LOCK_FILE).stat().st_mtime_ns
        time.sleep(0.3)
        assert (tmp_path / LOCK_FILE).stat().st_mtime_ns > first


def test_lock_is_released_where_the_block_fails(tmp_path):
    with pytest.raises(ZeroDivisionError), run_lock.run_lock(tmp_path):
        raise ZeroDivisionError
    with run_lock.run_lock(tmp_path):
        pass


def test_of_many_processes_that_find_a_stale_lock_one_takes_it(tmp_path):
    write(tmp_path, pid=2**30)
    held = []

    def take(barrier):
        barrier.wait()
        try:
            with run_lock.run_lock(tmp_path):
                held.append(1)
                finished.wait(10)
        except RunLockedError:
            refused.append(1)
        if len(held) + len(refused) == 8:
            finished.set()

    finished, refused, barrier = threading.Event(), [], threading.Barrier(8)
    threads = [threading.Thread(target=take, args=(barrier,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(held), len(refused)) == (1, 7)
