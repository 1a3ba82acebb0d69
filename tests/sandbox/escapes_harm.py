"""Escapes that attack processes or exhaust resources."""

from __future__ import annotations

from escape import MIB, SHORT, Escape

from credit_trl.sandbox import Limits

PROCESSES = [
    Escape(
        "fork bomb",
        r"""
        import time
        forks = 0
        try:
            for n in range(300):
                if os.fork() == 0:
                    time.sleep(3)
                    os._exit(0)
                forks += 1
        except OSError as error:
            print(error)
        if forks > 12: print("ESCAPED the process limit:", forks)
        """,
        statuses=("ok", "runtime_error"),
    ),
    Escape(
        "fork bomb that breeds",
        r"""
        import time
        end = time.time() + 0.4
        while time.time() < end:
            try:
                os.fork()
            except OSError:
                time.sleep(0.01)
        """,
        statuses=("ok", "runtime_error", "timeout"),
    ),
    Escape(
        "thread bomb",
        r"""
        import threading, time
        threading.stack_size(32768)
        started = 0
        try:
            for n in range(300):
                threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
                started += 1
        except (RuntimeError, OSError) as error:
            print(error)
        time.sleep(0.3)
        if started > 12: print("ESCAPED the thread limit:", started)
        """,
        statuses=("ok", "runtime_error"),
    ),
    Escape(
        "leave a daemon behind",
        r"""
        import time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(30)
            os._exit(0)
        print("left")
        """,
        statuses=("ok", "runtime_error"),
    ),
    Escape(
        "leave a daemon that floods standard output",
        r"""
        if os.fork() == 0:
            os.setsid()
            while True: os.write(1, b'x' * 4096)
        """,
        statuses=("ok", "runtime_error", "output_limit"),
    ),
    Escape(
        "leave zombies",
        r"""
        for n in range(8):
            if os.fork() == 0: os._exit(0)
        print('left')
        """,
        statuses=("ok", "runtime_error"),
    ),
    Escape(
        "kill everything",
        r"""
        import signal
        for target in (-1, 0):
            try:
                os.kill(target, signal.SIGKILL)
            except OSError as error:
                print(error)
        """,
        statuses=("ok", "runtime_error"),
    ),
    Escape(
        "kill the grader",
        r"""
        import signal
        for target in (os.getppid(), 1, SERVER, TRAINER, VICTIM):
            if target == os.getpid(): continue
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.kill(target, number)
                except OSError as error:
                    print(error)
            try:
                os.killpg(target, signal.SIGKILL)
            except OSError as error:
                print(error)
        """,
        statuses=("ok", "runtime_error"),
    ),
    Escape(
        "signal by other calls",
        r"""
        import fcntl, signal, threading
        if VICTIM != os.getpid(): attempt("pidfd", lambda: signal.pidfd_send_signal(os.pidfd_open(VICTIM), 9))
        c = libc()
        for number in (200, 129): called_ = c.syscall(number, VICTIM, 9, 0); print(called_)
        c.syscall(234, VICTIM, VICTIM, 9)
        r, w = os.pipe()
        attempt("owner", lambda: fcntl.fcntl(r, fcntl.F_SETOWN, VICTIM))
        attempt("signal number", lambda: fcntl.fcntl(r, 10, 9))
        """,
    ),
    Escape(
        "trace and read other processes",
        r"""
        import ctypes
        c = libc()
        for pid in (TRAINER, VICTIM, os.getppid()):
            attempt("ptrace", lambda: called(c.ptrace(16, pid, None, None)))
            attempt("seize", lambda: called(c.ptrace(0x4206, pid, None, None)))
        buffer = ctypes.create_string_buffer(64)
        class Vec(ctypes.Structure):
            _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]
        mine, theirs = Vec(ctypes.addressof(buffer), 64), Vec(0x400000, 64)
        def peek():
            return called(c.process_vm_readv(VICTIM, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0))
        attempt("read memory", peek)
        """,
    ),
    Escape(
        "change other processes' limits and priority",
        r"""
        import resource
        attempt("limits", lambda: resource.prlimit(VICTIM, resource.RLIMIT_NOFILE, (3, 3)))
        attempt("affinity", lambda: os.sched_setaffinity(VICTIM, {0}))
        attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, VICTIM, 19))
        attempt("all priorities", lambda: os.setpriority(os.PRIO_USER, 0, 19))
        """,
    ),
    Escape(
        "raise its own limits",
        r"""
        import resource
        for name in ('CPU', 'AS', 'NOFILE', 'FSIZE', 'CORE'):
            kind = getattr(resource, 'RLIMIT_' + name)
            hard = resource.getrlimit(kind)[1]
            attempt(name, lambda: resource.setrlimit(kind, (hard + 1000, hard + 1000)))
        """,
    ),
]

RESOURCES = [
    Escape(
        "memory bomb",
        r"""
        kept = []
        for n in range(200):
            kept.append(b'x' * (10 << 20))
        print('ESCAPED the memory limit')
        """,
        statuses=("memory",),
    ),
    Escape(
        "memory bomb by mmap",
        r"""
        import mmap
        kept = []
        for n in range(20):
            kept.append(mmap.mmap(-1, 100 << 20))
            kept[-1].write(b'x' * (1 << 20))
        print('ESCAPED the memory limit')
        """,
        statuses=("runtime_error", "memory"),
    ),
    Escape(
        "memory bomb in several processes",
        r"""
        import time
        for n in range(6):
            if os.fork() == 0: break
        kept = b'x' * (120 << 20)
        time.sleep(3)
        print('ESCAPED the memory limit')
        """,
        statuses=("memory", "runtime_error"),
    ),
    Escape(
        "memory outside the process's count",
        r"""
        def memory_file():
            fd = os.memfd_create('bomb')
            return os.write(fd, bytes(1 << 20))
        attempt('memory file', memory_file)
        c = libc()
        attempt('System V', lambda: called(c.shmget(0, 100 << 20, 0o1600)))
        attempt('POSIX', lambda: os.open('/dev/shm/bomb', os.O_RDWR | os.O_CREAT))
        attempt('message queue', lambda: called(c.mq_open(b'/bomb', 0o102, 0o600, None)))
        attempt('locked', lambda: called(c.mlockall(3)))
        import mmap
        anonymous = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
        attempt('anonymous shared', lambda: mmap.mmap(-1, 1 << 20, flags=anonymous))
        attempt('huge pages', lambda: mmap.mmap(-1, 1 << 21, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000))
        def zeros():
            with open('/dev/zero', 'r+b', buffering=0) as file:
                return mmap.mmap(file.fileno(), 1 << 20)
        attempt('mapped zeros', zeros)
        attempt('swapped out', lambda: mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).madvise(21))
        """,
    ),
    Escape(
        "ten gigabytes of output",
        r"""
        chunk = 'x' * (1 << 16)
        for n in range(160000):
            print(chunk)
        print('ESCAPED the output limit')
        """,
        statuses=("output_limit",),
    ),
    Escape(
        "ten gigabytes of errors",
        r"""
        chunk = 'x' * (1 << 16)
        for n in range(160000):
            os.write(2, chunk.encode())
        print('ESCAPED the output limit')
        """,
        statuses=("output_limit",),
    ),
    Escape(
        "a huge return value",
        r"""
        def f():
            return 'x' * (40 << 20)
        """,
        fn_name="f",
        statuses=("output_limit", "memory"),
    ),
    Escape(
        "a huge traceback",
        r"""
        def f(n):
            if n: return f(n - 1)
            raise ValueError('x' * (20 << 20))
        f(900)
        """,
        statuses=("runtime_error", "memory"),
    ),
    Escape(
        "sleep past the limit",
        r"""
        import time
        time.sleep(30)
        print('ESCAPED')
        """,
        statuses=("timeout",),
        limits=SHORT,
    ),
    Escape(
        "stop itself",
        r"""
        import signal
        os.kill(os.getpid(), signal.SIGSTOP)
        while True: pass
        """,
        statuses=("timeout",),
        limits=SHORT,
    ),
    Escape(
        "loop deaf to signals",
        r"""
        import signal
        for n in range(1, 65):
            try:
                signal.signal(n, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        while True: pass
        """,
        statuses=("timeout",),
        limits=SHORT,
    ),
    Escape(
        "loop inside one C call",
        r"""
        pow(3, 10 ** 9)
        """,
        statuses=("timeout", "memory"),
        limits=SHORT,
    ),
    Escape(
        "hang while it exits",
        r"""
        import atexit, threading, time
        atexit.register(time.sleep, 30)
        threading.Thread(target=time.sleep, args=(30,)).start()
        """,
        statuses=("timeout", "runtime_error"),
        limits=SHORT,
    ),
    Escape(
        "use up the processor limit",
        r"""
        while True: pass
        """,
        statuses=("timeout",),
        limits=Limits(cpu_seconds=1, wall_seconds=10, memory_bytes=256 * MIB),
    ),
]
