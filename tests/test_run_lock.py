"""One trainer in a run directory: a second one is refused with the name of the first, a dead lock is taken over."""

import errno
import gc
import os
import socket
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from credit_trl import run_directory
from credit_trl.run_directory import LOCK_FILE, RunLockedError, run_lock
from tables import tables_of

TABLES = tables_of(__file__)


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock, and the id of its child."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    command = [sys.executable, "-c", TABLES["holder"], str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    child = int(process.stdout.readline())
    yield process, child
    process.kill()
    process.wait()
    os.kill(child, 9)


@pytest.mark.filterwarnings("ignore:No sample of this generation batch")
def test_second_trainer_is_refused_with_host_process_and_start(make_trainer):
    second = []

    def rewards(completions, **kwargs):
        trainer = make_trainer()
        with pytest.raises(RunLockedError) as refused:
            trainer.train()
        second.append(str(refused.value))
        return [0.0] * len(completions)

    make_trainer(rewards, max_steps=1).train()
    assert f"process {os.getpid()} on {socket.gethostname()}, started 20" in second[0]


def test_lock_of_another_process_is_kept_while_it_lives_and_free_once_it_is_killed(tmp_path, holder):
    process, _ = holder
    with pytest.raises(RunLockedError, match=f"process {process.pid} on"), run_lock(tmp_path):
        pass
    process.kill()
    process.wait()
    with run_lock(tmp_path):
        assert f"process {os.getpid()} on" in (tmp_path / LOCK_FILE).read_text()


def test_lock_is_released_where_the_block_fails(tmp_path):
    with pytest.raises(ZeroDivisionError), run_lock(tmp_path):
        raise ZeroDivisionError
    with run_lock(tmp_path):
        pass


def test_file_system_without_locks_is_warned_about(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(run_directory.fcntl, "flock", refuse)
    with run_lock(tmp_path):
        assert "cannot be locked" in caplog.text


def test_of_many_that_start_at_once_one_takes_the_lock(tmp_path):
    acquired, refused = [], []
    finished, barrier = threading.Event(), threading.Barrier(8)

    def take():
        barrier.wait()
        try:
            with run_lock(tmp_path):
                acquired.append(1)
                finished.wait(600)
        except RunLockedError:
            refused.append(1)
            if len(refused) == 7:
                finished.set()

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(acquired), len(refused)) == (1, 7)


def test_removed_lock_file_lets_no_second_trainer_in(tmp_path):
    with run_lock(tmp_path) as lock:
        (tmp_path / LOCK_FILE).unlink()
        with pytest.raises(RunLockedError, match="end that process"), run_lock(tmp_path):
            pass
        with pytest.raises(RunLockedError, match=f"{LOCK_FILE} in it was removed"):
            lock.check()


def test_removed_lock_file_is_noticed_where_folders_have_no_locks(tmp_path, monkeypatch):
    flock = run_directory.fcntl.flock

    def of_files(descriptor, kind):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(descriptor, kind)

    monkeypatch.setattr(run_directory.fcntl, "flock", of_files)
    with run_lock(tmp_path) as lock:
        with pytest.raises(RunLockedError), run_lock(tmp_path):
            pass
        (tmp_path / LOCK_FILE).unlink()
        with run_lock(tmp_path), pytest.raises(RunLockedError):
            lock.check()
        assert (tmp_path / LOCK_FILE).exists() is False


def test_moved_folder_is_noticed_and_a_new_one_has_a_lock_of_its_own(tmp_path):
    with run_lock(tmp_path / "run") as lock:
        lock.check()
        (tmp_path / "run").rename(tmp_path / "moved")
        with run_lock(tmp_path / "run") as second:
            second.check()
            with pytest.raises(RunLockedError, match="was moved"):
                lock.check()


def test_lock_leaves_nothing_behind(tmp_path):
    """Neither a file nor, in a process that trains often, the lock itself."""
    with run_lock(tmp_path) as lock:
        of_lock = weakref.ref(lock)
    del lock
    gc.collect()
    assert of_lock() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "folder", "file instead of a folder"])
def test_what_cannot_be_a_lock_is_refused_and_stays_as_it_is(tmp_path, kind):
    folder, target = tmp_path / "run", tmp_path / "target"
    target.write_text("mine")
    if kind == "file instead of a folder":
        folder = target
    else:
        folder.mkdir()
        place = folder / LOCK_FILE
        place.symlink_to(target) if kind == "link" else place.mkdir()
    with pytest.raises(ValueError, match=r"Remove it, or set another `output_dir`"), run_lock(folder):
        pass
    assert target.read_text() == "mine"
