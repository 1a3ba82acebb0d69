"""Local sandboxes: deadlines, groups, restarts, leftover processes, and memory."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pytest
from observing import SOURCES, gone, run_one

from credit_trl.sandbox import Limits, Program, SandboxError, observe
from credit_trl.sandbox.pool import PoolSandbox

MIB = 1024 * 1024


def test_deadline_ends_running_programs(sandbox):
    programs = [Program("print(1)"), *[Program("while True: pass", limits=Limits(wall_seconds=30))] * 20]
    outcomes = sandbox.run(programs, deadline=3.0)
    assert [outcome.status for outcome in outcomes] == ["ok"] + ["deadline"] * 20
    assert run_one(sandbox, "print(2)").stdout == "2\n"


def test_deadline_holds_if_server_hangs(sandbox):
    server = sandbox.server_pid
    os.kill(server, signal.SIGSTOP)
    outcomes = sandbox.run([Program("print(1)")] * 3, deadline=0.5)
    assert [outcome.status for outcome in outcomes] == ["deadline"] * 3
    assert run_one(sandbox, "print(2)").stdout == "2\n"
    assert gone(server)


def test_dead_server_is_replaced_and_programs_rerun(sandbox):
    server = sandbox.server_pid
    timer = threading.Timer(0.3, os.kill, (server, signal.SIGKILL))
    timer.start()
    outcomes = sandbox.run([Program(f"import time; time.sleep(0.1); print({n})") for n in range(10)])
    timer.join()
    assert [outcome.stdout for outcome in outcomes] == [f"{n}\n" for n in range(10)]
    assert sandbox.server_pid != server


def test_killed_server_leaves_no_process():
    """Nor one that the kernel does not end with its parent, as a child that bubblewrap is about to confine."""
    with PoolSandbox("unprotected", 1) as opened:
        batch = threading.Thread(target=lambda: opened.run([Program(SOURCES["orphans"])], deadline=3.0))
        batch.start()
        server = opened.server_pid
        give_up = time.monotonic() + 120
        while len(family := observe.descendants(server)) < 4 and time.monotonic() < give_up:
            time.sleep(0.01)
        os.kill(server, signal.SIGKILL)
        assert len(family) == 4
        assert all(gone(pid) for pid in family)
        batch.join()


def test_failure_to_start_programs_raises(sandbox, monkeypatch, system_python):
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        interpreter = shutil.copy(os.path.realpath(system_python), os.path.join(directory, "python"))
        monkeypatch.setattr(sys, "executable", interpreter)
        with PoolSandbox(sandbox.tier, 1) as short_lived:
            assert run_one(short_lived, "print(1)").stdout == "1\n"
            os.unlink(interpreter)
            with pytest.raises(SandboxError, match=r"could not run program 0, twice: .*No such file"):
                short_lived.run([Program("print(1)")])


def test_server_that_dies_twice_raises(sandbox, monkeypatch):
    monkeypatch.setattr("credit_trl.sandbox.pool.asdict", lambda program: {})
    with pytest.raises(SandboxError, match="server ended"):
        sandbox.run([Program("print(1)")])
    monkeypatch.undo()
    assert run_one(sandbox, "print(1)").stdout == "1\n"


def test_malformed_arguments_raise(any_sandbox):
    with pytest.raises(ValueError, match="not JSON"):
        run_one(any_sandbox, "def f(a): return a", fn_name="f", arguments="[1,]")
    assert run_one(any_sandbox, "print(1)").stdout == "1\n"


def test_long_integers_are_arguments(any_sandbox):
    long = f"[{'9' * 5_000}]"  # more digits than Python converts by default
    assert run_one(any_sandbox, "def f(a): return a % 10", fn_name="f", arguments=long).value == "9"
    source = "import sys\ndef f(a): return sys.get_int_max_str_digits()"
    assert run_one(any_sandbox, source, fn_name="f", arguments=long).value == str(sys.get_int_max_str_digits())


def test_waiting_for_another_batch_counts_toward_deadline(sandbox):
    long = threading.Thread(target=sandbox.run, args=([Program("import time; time.sleep(2.5)")],))
    long.start()
    time.sleep(0.3)
    [outcome] = sandbox.run([Program("print(1)")], deadline=0.2)
    assert long.is_alive()
    assert outcome.status == "deadline"
    long.join()


def test_close_ends_batch_of_another_thread(sandbox):
    opened = PoolSandbox(sandbox.tier, 1)
    caught: list[BaseException] = []

    def work():
        with pytest.raises(SandboxError, match="closed") as error:
            opened.run([Program("while True: pass", limits=Limits(cpu_seconds=20, wall_seconds=20))] * 2)
        caught.append(error.value)

    batch = threading.Thread(target=work)
    batch.start()
    time.sleep(0.5)
    family = list(observe.descendants(opened.server_pid))
    opened.close()
    batch.join()
    assert len(caught) == 1
    assert len(family) > 1
    assert all(gone(pid) for pid in family)
    opened.close()
    with pytest.raises(SandboxError, match="closed"):
        opened.run([Program("pass")])
    assert opened.server_pid is None


@pytest.fixture
def interruptible():
    """Let SIGINT raise, also if the shell started the tests in the background and ignores it."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


def test_interrupt_kills_programs(sandbox, interruptible):
    server = sandbox.server_pid
    main = threading.main_thread().ident
    timer = threading.Timer(0.4, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        sandbox.run([Program("while True: pass")] * 4)
    timer.join()
    assert gone(server)
    assert run_one(sandbox, "print(3)").stdout == "3\n"


def test_programs_and_server_end_with_the_trainer(sandbox):
    command = [sys.executable, "-c", SOURCES["trainer"], sandbox.tier]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    server = int(trainer.stdout.readline())
    family = list(observe.descendants(server))
    assert len(family) >= 3
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert all(gone(pid) for pid in family)


def test_sandbox_is_refused_in_forked_child(sandbox):
    child = os.fork()
    if child == 0:
        try:
            sandbox.run([Program("pass")])
        except SandboxError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert run_one(sandbox, "print(4)").stdout == "4\n"


def test_server_imports_only_the_sandbox(sandbox):
    server = sandbox.server_pid
    with open(f"/proc/{server}/maps") as maps:
        mapped = maps.read()
    assert "torch" not in mapped
    assert "numpy" not in mapped
    with open(f"/proc/{server}/statm") as statm:
        assert int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") < 60 * MIB


@pytest.mark.slow
def test_server_does_not_grow_over_750_programs(sandbox):
    """Nor does this process gain descriptors, whatever the ending of the programs."""
    kinds = [
        Program("print(input())", stdin="x" * 10_000),
        Program("def f(n): return [n] * 1000", fn_name="f", arguments="[1]"),
        Program("import time; time.sleep(9)", limits=Limits(wall_seconds=0.1)),
        Program("x = bytearray(1 << 30)", limits=Limits(memory_bytes=192 * MIB)),
        Program("print('x' * 99_999)", limits=Limits(output_bytes=50_000)),
    ]
    used = []
    for _ in range(3):
        outcomes = sandbox.run(kinds * 50)
        assert {outcome.status for outcome in outcomes} == {"ok", "timeout", "memory", "output_limit"}
        server = f"/proc/{sandbox.server_pid}"
        assert all(gone(pid) for pid in observe.descendants(sandbox.server_pid) if pid != sandbox.server_pid)
        with open(f"{server}/statm") as statm:
            memory = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        used.append((memory, len(os.listdir(f"{server}/fd")), len(os.listdir("/proc/self/fd"))))
    assert used[2][0] - used[0][0] < 2 * MIB, used
    assert used[0][1:] == used[2][1:], used
