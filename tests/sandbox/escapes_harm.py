"""Escapes that attack processes or exhaust resources."""

from __future__ import annotations

from dataclasses import replace

from escape import LIMITS, MIB, SHORT, Escape

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
            attempt("session", os.setsid)
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
            attempt("session", os.setsid)
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
        "make sessions and process groups",
        r"""
        attempt("session", os.setsid)
        attempt("group", lambda: os.setpgid(0, 0))
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
        import fcntl
        attempt('locks of a file', lambda: fcntl.lockf(open(os.__file__), fcntl.LOCK_SH | fcntl.LOCK_NB, 1))
        """,
    ),
    Escape(
        "memory in Unix sockets",
        r"""
        import socket, time
        for _ in range(10):
            try:
                if os.fork() == 0: break
            except OSError:
                break
        held, pairs = 0, []
        try:
            while True:
                pairs.append(socket.socketpair())
                for end in pairs[-1]:
                    end.setblocking(False)
                    attempt("larger buffer", lambda: end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 23))
                    try:
                        while True: held += end.send(bytes(1 << 16))
                    except BlockingIOError:
                        pass
        except OSError as error:
            print(error)
        if held > 64 << 20: print("ESCAPED the memory limit", held)
        time.sleep(1)
        """,
        statuses=("ok", "memory", "runtime_error"),
        limits=replace(LIMITS, memory_bytes=192 * MIB),
    ),
    Escape(
        "hide sockets in sockets",
        r"""
        import array, socket
        a, b = socket.socketpair()
        hidden = array.array("i", [b.fileno()])
        attempt("send a socket", lambda: a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, hidden)]))
        """,
    ),
    Escape(
        "memory in pipes",
        r"""
        held, ends = 0, []
        try:
            while True:
                ends.append(os.pipe())
                os.set_blocking(ends[-1][1], False)
                try:
                    import fcntl
                    attempt("larger pipe", lambda: fcntl.fcntl(ends[-1][1], 1031, 1 << 20))
                    while True: held += os.write(ends[-1][1], bytes(1 << 16))
                except BlockingIOError:
                    pass
        except OSError as error:
            print(error)
        if held > 8 << 20: print("ESCAPED the memory limit", held)
        """,
    ),
    Escape(
        "memory in page tables",
        r"""
        import ctypes
        c = libc()
        c.mmap.restype = ctypes.c_void_p
        c.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        for _ in range(3):
            try:
                if os.fork() == 0: break
            except OSError:
                break
        for n in range(40000):  # each page needs two pages of tables
            place = c.mmap(0x200000000000 + (n << 30), 4096, 3, 0x100022, -1, 0)
            if place is None or place == 2 ** 64 - 1: break
            ctypes.memset(place, 1, 1)
        print("ESCAPED the memory limit" if n > 30000 else n)
        """,
        statuses=("memory", "ok", "runtime_error"),
    ),
    Escape(
        "queue signals and timers",
        r"""
        import ctypes, signal
        signal.pthread_sigmask(signal.SIG_BLOCK, range(34, 60))
        c, queued = libc(), 0
        info = ctypes.create_string_buffer(128)
        for number in range(5000):
            ctypes.memset(info, 0, 128)
            ctypes.c_int.from_buffer(info, 8).value = -1
            if c.syscall(129, os.getpid(), 40, info) == 0: queued += 1
        if queued > 1000: print("ESCAPED the limit of signals", queued)
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

# Two copies run beside a program that needs most of its processor time. `multiply` is in `PRELUDE`.
_NEIGHBOUR = replace(LIMITS, cpu_seconds=1, wall_seconds=1, memory_bytes=192 * MIB, processes=16)
NEIGHBOURS = [
    Escape(
        "spin in many sessions",
        r"""
        def work():
            while True: pass
        multiply(work)
        """,
        statuses=("timeout",),
        limits=_NEIGHBOUR,
        beside=True,
    ),
    Escape(
        "spin in children that end at once",
        r"""
        import signal, time
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        except OSError as error:
            print(error)
        while True:
            try:
                if os.fork() == 0:
                    end = time.monotonic() + 0.02
                    while time.monotonic() < end: pass
                    os._exit(0)
            except OSError:
                pass
        """,
        statuses=("timeout",),
        limits=_NEIGHBOUR,
        beside=True,
    ),
    Escape(
        "sleep in many processes",
        r"""
        multiply(lambda: time.sleep(60))
        """,
        statuses=("timeout",),
        limits=_NEIGHBOUR,
        beside=True,
    ),
    Escape(
        "allocate in many processes",
        r"""
        def work():
            kept = []
            while True: kept.append(bytearray(1 << 22))
        multiply(work)
        """,
        statuses=("memory", "timeout", "runtime_error"),
        limits=_NEIGHBOUR,
        beside=True,
    ),
    Escape(
        "flood standard output from many processes",
        r"""
        def work():
            while True: os.write(1, bytes(1 << 16))
        multiply(work)
        """,
        statuses=("output_limit", "timeout"),
        limits=_NEIGHBOUR,
        beside=True,
    ),
]
