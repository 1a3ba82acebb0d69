"""Probe of a sandbox's isolation: programs that try to escape.

A container's policy can forbid what the kernel offers, and a sandbox that starts may still not isolate. So each tier
runs programs that attempt escapes, on files and sockets made for them, and is refused if any attempt succeeds.
"""

import json
import os
import socket
import tempfile
from dataclasses import replace

from credit_trl.sandbox.pool import PACKAGE, PoolSandbox
from credit_trl.sandbox.protocol import MIB, Limits, Program, SandboxError, sandbox_error

_CANARY = """
import errno, mmap, os, socket

def attempt(escapes, name, action):
    try:
        if action() is not False:
            escapes.append(name)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN):
            raise  # it was not refused: this process or machine has no more
    except (ImportError, AttributeError):
        pass

def read(path):
    with open(path, "rb") as file:
        return bool(file.read(1))

def write(path):
    with open(path, "wb") as file:
        file.write(b"x")

def connect(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as stream:
        stream.settimeout(1)
        stream.connect(address)

def escapes(bait, port, abstract, trainer, server, package, tier):
    found = []
    attempt(found, "read this project's files", lambda: read(package + "/tasks/examples/problems.jsonl"))
    attempt(found, "read a file outside", lambda: read(bait + "/secret"))
    attempt(found, "wrote a file outside", lambda: write(bait + "/planted"))
    attempt(found, "removed a file outside", lambda: os.unlink(bait + "/removable"))
    attempt(found, "changed a file's mode outside", lambda: os.chmod(bait + "/secret", 0o777))
    for pid in (trainer, server):
        attempt(found, "read another process's environment", lambda: read(f"/proc/{pid}/environ"))
        attempt(found, "read another process's memory map", lambda: read(f"/proc/{pid}/maps"))
    attempt(found, "read a kernel file", lambda: read("/proc/kallsyms"))
    attempt(found, "connected to a local port", lambda: connect(socket.AF_INET, ("127.0.0.1", port)))
    attempt(found, "connected to a local socket", lambda: connect(socket.AF_UNIX, "\\0" + abstract))
    attempt(found, "became root", lambda: os.setuid(0))
    # The filter of system calls refuses these, which namespaces and Landlock allow.
    attempt(found, "made a network socket", lambda: socket.socket(socket.AF_INET).close())
    attempt(found, "started a process", lambda: os.fork() or os._exit(0))
    attempt(found, "made a session", os.setsid)
    attempt(found, "made uncounted shared memory", lambda: mmap.mmap(-1, 4096))
    attempt(found, "made a memory file", lambda: os.close(os.memfd_create("bait")))
    attempt(found, "read extended attributes outside", lambda: os.listxattr(bait + "/secret"))
    if os.getuid() == 0:
        found.append("runs as root")
    if "CREDIT_SANDBOX_CANARY" in os.environ:
        found.append("sees the trainer's environment")
    # A namespace has its own process ids: the trainer's may be that of a process inside.
    if tier == "bubblewrap" and (os.getpid(), os.getppid()) != (2, 1):  # the child of the namespace's first process
        found.append("has no process namespace of its own")
    if tier != "bubblewrap" and trainer != os.getpid():
        # Signal 0 shows whether a real signal would arrive.
        attempt(found, "may signal the trainer", lambda: os.kill(trainer, 0))
    return found
"""

_SHORT = Limits(wall_seconds=0.2, memory_bytes=256 * MIB)
_LIMITS = replace(_SHORT, cpu_seconds=5, wall_seconds=20, processes=4, open_files=32, output_bytes=1 << 16)


def probe(sandbox: PoolSandbox) -> None:
    """Run the probe's programs in an open sandbox.

    Raises:
        SandboxError: a program could not be started, escaped, or exceeded a limit; the message lists the faults.
    """
    with (
        tempfile.TemporaryDirectory(prefix="credit-trl-canary-") as bait,
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as local,
    ):
        for name in ("secret", "removable"):
            with open(os.path.join(bait, name), "x") as file:
                file.write("bait")
                os.fchmod(file.fileno(), 0o666)
        os.chmod(bait, 0o777)  # last: until now no other user could put a link in place of a file
        abstract = f"credit-trl-canary-{os.getpid()}-{os.urandom(4).hex()}"
        local.bind("\0" + abstract)
        local.listen()
        port = listener.getsockname()[1]
        arguments = [bait, port, abstract, os.getpid(), sandbox.server_pid, PACKAGE, sandbox.tier]
        programs = [
            Program(_CANARY, fn_name="escapes", arguments=json.dumps(arguments), limits=_LIMITS),
            Program("bytearray(512 * 1024 * 1024)", limits=_LIMITS),
            Program("import time; time.sleep(10)", limits=_SHORT),
        ]
        escapes, memory, sleeper = sandbox.run(programs, deadline=60.0)
        if escapes.status != "ok":
            raise sandbox_error(f"A program of the probe did not finish: {escapes.status}, {escapes.error}.")
        faults = json.loads(escapes.value or "null")
        if os.path.exists(os.path.join(bait, "planted")) or not os.path.exists(os.path.join(bait, "removable")):
            faults.append("changed a directory outside")
        if memory.status != "memory":
            faults.append(f"allocated more than its limit ({memory.status})")
        if sleeper.status != "timeout":
            faults.append(f"slept past its limit ({sleeper.status})")
    if faults:
        raise SandboxError(f"It does not isolate programs: {'; '.join(dict.fromkeys(faults))}.")
