"""Escapes that try to reach files, the surroundings, the network, or privileges."""

from __future__ import annotations

from escape import Escape

FILES = [
    Escape(
        "read a file outside",
        r"""
        attempt("read", lambda: read(SECRET))
        """,
    ),
    Escape(
        "read system files",
        r"""
        for p in ("/etc/shadow", "/etc/passwd", "/root/.bashrc"): attempt(p, lambda: read(p))
        """,
    ),
    Escape(
        "list directories outside",
        r"""
        for p in (BAIT, "/root", "/home", "/etc"): attempt(p, lambda: os.listdir(p))
        """,
    ),
    Escape(
        "climb out with ..",
        r"""
        attempt("climb", lambda: read("../" * 30 + SECRET.lstrip("/"))); os.chdir("/")
        attempt("climb", lambda: read(SECRET.lstrip("/")))
        """,
    ),
    Escape(
        "overwrite a file outside",
        r"""
        attempt("write", lambda: open(SECRET, "w").write("gone"))
        """,
    ),
    Escape(
        "append to a file outside",
        r"""
        attempt("append", lambda: open(WRITABLE + "/log", "a").write("planted"))
        """,
    ),
    Escape(
        "create a file outside",
        r"""
        attempt("create", lambda: open(WRITABLE + "/planted", "x").write("planted"))
        """,
    ),
    Escape(
        "truncate a file outside",
        r"""
        attempt("truncate", lambda: os.truncate(SECRET, 0))
        attempt("open truncating", lambda: os.open(SECRET, os.O_RDONLY | os.O_TRUNC))
        """,
    ),
    Escape(
        "delete and rename outside",
        r"""
        attempt("delete", lambda: os.unlink(WRITABLE + "/log"))
        attempt("rename", lambda: os.rename(WRITABLE + "/log", WRITABLE + "/moved"))
        attempt("mkdir", lambda: os.mkdir(WRITABLE + "/directory"))
        """,
    ),
    Escape(
        "change modes and times outside",
        r"""
        attempt("chmod", lambda: os.chmod(SECRET, 0o777))
        attempt("chown", lambda: os.chown(SECRET, os.getuid(), -1))
        attempt("utime", lambda: os.utime(SECRET, (1, 1)))
        attempt("setxattr", lambda: os.setxattr(SECRET, "user.planted", b"x"))
        """,
    ),
    Escape(
        "read extended attributes outside",
        r"""
        for p in (SECRET, "/usr/lib", os.__file__) if not os.path.isdir("/tmp") else (SECRET,):
            attempt(f"list {p}", lambda: os.listxattr(p))
            attempt(f"get {p}", lambda: os.getxattr(p, "user.bait"))
        """,
    ),
    Escape(
        "follow a symbolic link out",
        r"""
        def link():
            os.symlink(SECRET, "link")
            return read("link")
        attempt("symlink", link)
        def directory_link():
            os.symlink("/", "root")
            return read("root" + SECRET)
        attempt("directory symlink", directory_link)
        """,
    ),
    Escape(
        "hard-link a file in",
        r"""
        attempt("link", lambda: (os.link(SECRET, "link"), read("link")))
        """,
    ),
    Escape(
        "change the interpreter",
        r"""
        import heapq
        attempt("library", lambda: open(heapq.__file__, "a").write("planted"))
        attempt("executable", lambda: open(sys.executable, "r+b").write(b"x"))
        attempt("customize", lambda: open(os.path.dirname(heapq.__file__) + "/sitecustomize.py", "w").write("x"))
        attempt("truncate", lambda: os.open(heapq.__file__, os.O_RDONLY | os.O_TRUNC))
        """,
    ),
    Escape(
        "fill the scratch directory",
        r"""
        written = 0
        try:
            for n in range(100):
                with open(f"fill{n}", "wb") as file:
                    written += file.write(bytes(1 << 20))
        except OSError as error:
            print(error)
        if written > 8 << 20: print("ESCAPED the size of the scratch directory", written)
        """,
    ),
    Escape(
        "fill the scratch directory with empty files",
        r"""
        try:
            for n in range(150000): os.close(os.open(f'empty{n}', os.O_CREAT | os.O_WRONLY))
        except OSError as error:
            print(error)
        else:
            print('ESCAPED the number of scratch files')
        """,
        statuses=("ok", "runtime_error"),
    ),
    Escape(
        "write a file of ten gigabytes",
        r"""
        def huge():
            with open("huge", "wb") as file:
                file.seek(10 << 30)
                file.write(b"x")
                file.flush()
        attempt("huge file", huge)
        """,
    ),
    Escape(
        "make and open devices",
        r"""
        import stat
        attempt("mknod", lambda: os.mknod("disk", 0o666 | stat.S_IFBLK, os.makedev(254, 0)))
        for p in ("/dev/mem", "/dev/kmsg", "/dev/vda", "/dev/sda", "/dev/tty", "/dev/ptmx", "/dev/fuse", "/dev/kvm"):
            attempt(p, lambda: os.open(p, os.O_RDWR))
        """,
    ),
    Escape(
        "write kernel settings",
        r"""
        for p in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/self/oom_score_adj",
                  "/sys/fs/cgroup/cgroup.procs", "/proc/self/uid_map", "/proc/self/coredump_filter"):
            attempt(p, lambda: open(p, "w").write("0"))
        """,
    ),
    Escape(
        "read installed packages",
        r"""
        import glob
        roots = (os.path.dirname(os.__file__), "/usr/lib", "/usr/lib64", "/usr/local/lib")
        kinds = ("site-packages", "dist-packages", "*/site-packages", "*/dist-packages")
        places = [f"{root}/{kind}/**" for root in roots for kind in kinds]
        for place in places:
            for path in list(filter(os.path.isfile, glob.glob(place, recursive=True)))[:50]:
                attempt(path, lambda: read(path))
        for name in ("__init__.py", "tasks/examples/problems.jsonl"):
            attempt(name, lambda: read(f"{PACKAGE}/{name}"))
        """,
    ),
    Escape(
        "guess the expected output's file",
        r"""
        import glob
        found = []
        for root in (".", "/tmp", "/var/tmp", BAIT, WRITABLE, "/", "/dev/shm", "/run", "/proc/self/fd"):
            for pattern in ("*expected*", "*answer*", "*output*", "*test*", "*.json", "*"):
                for path in glob.glob(os.path.join(root, pattern)):
                    try:
                        found.append(read(path))
                    except OSError:
                        pass
        print(found)
        """,
    ),
]

SURROUNDINGS = [
    Escape(
        "read the environment",
        r"""
        print(dict(os.environ))
        """,
    ),
    Escape(
        "read /proc of other processes",
        r"""
        for pid in (os.getppid(), 1, TRAINER, SERVER, VICTIM):
            for name in ("environ", "maps", "mem", "fd/0", "root/etc/passwd", "cwd/README.md"):
                if pid != os.getpid(): attempt(f"{pid} {name}", lambda: read(f"/proc/{pid}/{name}"))
        """,
    ),
    Escape(
        "list processes",
        r"""
        attempt("list", lambda: [int(n) for n in os.listdir("/proc") if n.isdigit()] and True)
        """,
    ),
    Escape(
        "use inherited descriptors",
        r"""
        for fd in range(256):
            try:
                os.fstat(fd)
            except OSError:
                continue
            if fd > 4: attempt(f"descriptor {fd}", lambda: os.fstat(fd))
            try:
                print(fd, os.pread(fd, 1 << 20, 0))
            except OSError:
                pass
        """,
    ),
    Escape(
        "find the expected answer in memory",
        r"""
        import gc
        words = [repr(o) for o in gc.get_objects() if isinstance(o, (dict, list, tuple))]
        frame = sys._getframe()
        while frame:
            words.append(repr(frame.f_locals)[:100000])
            frame = frame.f_back
        print(max(words, key=len)[:1000])
        text = "".join(words)
        print(text[text.find("expected-"):][:100] if "expected-" in text else "none")
        """,
        statuses=("ok", "memory", "output_limit"),
    ),
]

NETWORK = [
    Escape(
        "connect to a local port",
        r"""
        import socket
        attempt("tcp", lambda: socket.create_connection(("127.0.0.1", PORT), timeout=2))
        """,
    ),
    Escape(
        "connect to other addresses",
        r"""
        import socket
        for address in ("127.0.0.2", "::1", "localhost"):
            attempt(address, lambda: socket.create_connection((address, PORT), timeout=1))
        """,
    ),
    Escape(
        "send a datagram",
        r"""
        import socket
        def send():
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
                return s.sendto(b"x", ("127.0.0.1", PORT))
        attempt("udp", send)
        """,
    ),
    Escape(
        "connect to Unix sockets",
        r"""
        import socket
        def connect(address):
            with socket.socket(socket.AF_UNIX) as s:
                s.connect(address)
        attempt("abstract", lambda: connect("\0" + ABSTRACT))
        attempt("path", lambda: connect(SOCKET))
        """,
    ),
    Escape(
        "send to a Unix socket through a pair",
        r"""
        import socket
        def pair():
            a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            return a.sendto(b"x", SOCKET + ".datagram")
        attempt("datagram pair", pair)
        """,
    ),
    Escape(
        "open raw and kernel sockets",
        r"""
        import socket
        for family, kind in ((socket.AF_INET, socket.SOCK_RAW), (17, socket.SOCK_RAW), (16, socket.SOCK_RAW),
                             (38, socket.SOCK_SEQPACKET), (40, socket.SOCK_STREAM)):
            attempt(f"family {family}", lambda: socket.socket(family, kind))
        """,
    ),
    Escape(
        "listen",
        r"""
        import socket
        attempt("listen", lambda: socket.create_server(("127.0.0.1", 0)))
        """,
    ),
]

PRIVILEGES = [
    Escape(
        "become root",
        r"""
        for name, ids in (('setuid', (0,)), ('setgid', (0,)), ('setresuid', (0, 0, 0)), ('setreuid', (0, 0))):
            attempt(name, lambda: getattr(os, name)(*ids))
        attempt('groups', lambda: os.setgroups([0]))
        if os.getuid() == 0 or os.geteuid() == 0: print('ESCAPED as root')
        """,
    ),
    Escape(
        "run a set-user-id file",
        r"""
        import shutil
        def own():
            shutil.copy(sys.executable, 'su')
            os.chmod('su', 0o4755)
            return os.stat('su').st_uid == 0
        attempt('own', own)
        for p in ('/bin/su', '/usr/bin/passwd', '/bin/mount', '/usr/bin/sudo'):
            attempt(p, lambda: os.posix_spawn(p, [p], {}))
        """,
    ),
    Escape(
        "execute other programs",
        r"""
        import subprocess
        for p in ('/bin/sh', '/usr/bin/env', '/usr/bin/python3'):
            attempt(p, lambda: subprocess.run([p, '-c', 'echo hello'], check=True))
        attempt('in place', lambda: os.execv('/bin/sh', ['sh', '-c', 'echo ESCAPED into a shell']))
        """,
    ),
    Escape(
        "make new namespaces",
        r"""
        c = libc()
        for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x04000000):
            attempt(f'unshare {flag:#x}', lambda: called(c.unshare(flag)))
        attempt('clone', lambda: called(c.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)))
        def join():
            return called(c.setns(os.open('/proc/1/ns/mnt', os.O_RDONLY), 0))
        attempt('setns', join)
        """,
    ),
    Escape(
        "mount and change the root",
        r"""
        c = libc()
        attempt('remount', lambda: called(c.mount(b'none', b'/', None, 0x20 | 0x1000, None)))
        attempt('tmpfs', lambda: called(c.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None)))
        attempt('umount', lambda: called(c.umount2(b'/tmp', 2)))
        attempt('chroot', lambda: os.chroot('.'))
        attempt('pivot', lambda: called(c.syscall(155, b'/', b'/tmp')))
        attempt('fsopen', lambda: called(c.syscall(430, b'tmpfs', 0)))
        attempt('open_tree', lambda: called(c.syscall(428, -100, b'/', 1)))
        """,
    ),
    Escape(
        "reach rarely used parts of the kernel",
        r"""
        c = libc()
        calls = dict(
            bpf=321, perf=298, io_uring=425, userfaultfd=323, keyctl=250, add_key=248, kexec=246, quotactl=179,
            init_module=175, reboot=169, swapon=167, settimeofday=164, sethostname=170, iopl=172, syslog=103,
            acct=163, personality=135, capset=126, fanotify=300, handle=304, vmsplice=278, pidfd_getfd=438,
        )
        for name, number in calls.items():
            attempt(name, lambda: called(c.syscall(number, 0, 0, 0, 0, 0, 0)))
        """,
    ),
    Escape(
        "crash with ctypes",
        r"""
        import ctypes
        ctypes.string_at(0)
        """,
        statuses=("runtime_error",),
    ),
    Escape(
        "32-bit system calls",
        r"""
        import ctypes, mmap
        code = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)
        code.write(bytes.fromhex('b814000000cd80c3'))
        address = ctypes.addressof(ctypes.c_char.from_buffer(code))
        print('ESCAPED by an old call', ctypes.CFUNCTYPE(ctypes.c_int)(address)())
        """,
        statuses=("runtime_error",),
    ),
]
