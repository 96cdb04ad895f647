# SPDX-License-Identifier: Apache-2.0
"""Hostile programs, each a few lines of Python that run inside a sandbox.

A program calls `escaped(…)` when it got something that no program may get, and prints `tried` when
it came to its end, so that a program that fails to run does not pass for a contained one.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent

PREAMBLE = """
import ctypes, errno, os, signal, socket, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
CANARY, PORT, NODE = os.environ["CANARY"], int(os.environ["PORT"]), int(os.environ["NODE"])
ABSTRACT, SECRET = os.environ["ABSTRACT"], "canary-" + "secret"
def escaped(why):
    os.write(1, b"ESCAPED: " + str(why).encode() + b"\\n")
def call(number, *arguments):
    result = libc.syscall(number, *arguments)
    return result if result >= 0 else -ctypes.get_errno()
def works(function, *arguments):
    try:
        function(*arguments)
    except Exception:
        return False
    return True
def writes(path, data):
    try:
        fd = os.open(path, os.O_WRONLY)
    except OSError:
        return False
    return works(os.write, fd, data)
def read_canary(path):
    try:
        with open(path, "rb") as file:
            return SECRET.encode() in file.read(4096)
    except OSError:
        return False
def connects(family, address, kind=socket.SOCK_STREAM):
    try:
        with socket.socket(family, kind) as one:
            one.settimeout(1)
            one.connect(address)
            one.send(b"x")
            return True
    except OSError:
        return False
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostile:
    name: str
    code: str
    limit: str = ""
    """The limit that must end it; empty: it comes to its end, or the kernel ends it."""
    wall_s: float = 30.0
    is_about_host: bool = True
    """False: it asks the host's own kernel for something, which gVisor may grant in its own."""
    is_own_death_fine: bool = False
    """Whether it may die by what it tries."""

    @property
    def source(self) -> str:
        return f"{PREAMBLE}\n{dedent(self.code)}\nos.write(1, b'tried')\n"


def _program(name: str, code: str, **settings: object) -> Hostile:
    return Hostile(name=name, code=code, **settings)  # pyright: ignore[reportArgumentType]


EXHAUSTION = (
    _program(
        "fork bomb",
        """
        while True:
            try:
                os.fork()
            except OSError:
                pass
        """,
        limit="wall_s",
        wall_s=0.6,
    ),
    _program(
        "fork bomb of daemons",
        """
        while True:
            try:
                if os.fork() == 0:
                    os.setsid()
            except OSError:
                os._exit(0)
        """,
        is_own_death_fine=True,
        wall_s=2.0,
    ),
    _program(
        "thread bomb",
        """
        threads = 0
        try:
            while threads < 2000:
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
                threads += 1
            escaped("2000 threads")
        except (RuntimeError, MemoryError):
            pass
        os.write(1, b"tried")
        os._exit(0)
        """,
    ),
    _program("ten gigabytes", "x = bytearray(10 << 30)", limit="memory_mb", is_own_death_fine=True),
    _program(
        "memory in small pieces",
        "x = []\nwhile True: x.append(b'x' * (1 << 20))",
        limit="memory_mb",
    ),
    _program(
        "memory in a memfd",
        """
        fd = os.memfd_create("x")
        while True:
            try:
                os.lseek(fd, 0, 2)
                os.write(fd, b"x" * (1 << 20))
            except OSError:
                break
        """,
        is_own_death_fine=True,
    ),
    _program(
        "memory in System V segments",
        """
        for key in range(64):
            number = libc.shmget(0, ctypes.c_size_t(64 << 20), 0o1600)
            libc.shmat.restype = ctypes.c_void_p
            at = libc.shmat(number, None, 0) if number >= 0 else None
            if at and at != ctypes.c_void_p(-1).value:
                ctypes.memset(at, 1, 64 << 20)
        """,
        is_own_death_fine=True,
    ),
    _program(
        "shared memory without end",
        """
        total = 0
        try:
            with open("/dev/shm/x", "wb") as file:
                while total < 1 << 30:
                    total += file.write(b"x" * (1 << 20))
            escaped("a gigabyte in /dev/shm")
        except OSError:
            pass
        """,
        is_own_death_fine=True,
    ),
    _program("endless output", "while True: os.write(1, b'x' * 65536)", limit="output_bytes"),
    _program("endless errors", "while True: os.write(2, b'x' * 65536)", limit="output_bytes"),
    _program("sleep for ever", "time.sleep(1e6)", limit="wall_s", wall_s=0.4),
    _program(
        "ignores every signal",
        """
        for number in range(1, 65):
            works(signal.signal, number, signal.SIG_IGN)
        time.sleep(1e6)
        """,
        limit="wall_s",
        wall_s=0.6,
    ),
    _program("stops itself", "os.kill(os.getpid(), signal.SIGSTOP)", limit="wall_s", wall_s=0.6),
    _program(
        "closes its output and stays",
        "os.close(1); os.close(2); time.sleep(1e6)",
        limit="wall_s",
        wall_s=0.6,
    ),
    _program("burns the processor", "while True: pass", limit="cpu_s"),
    _program(
        "burns the processor in short-lived children",
        """
        while True:
            if os.fork() == 0:
                end = time.process_time() + 0.05
                while time.process_time() < end: pass
                os._exit(0)
            os.wait()
        """,
        limit="cpu_s",
    ),
    _program(
        "fills the disk",
        """
        total = 0
        for number in range(64):
            try:
                with open(f"/work/f{number}", "wb", buffering=0) as file:
                    while True:
                        total += file.write(b"x" * (1 << 20))
            except OSError:
                pass
        if total > 17 << 20:
            escaped(f"{total} bytes on disk")
        """,
        is_own_death_fine=True,
    ),
    _program(
        "fills /tmp",
        """
        total = 0
        try:
            with open("/tmp/x", "wb", buffering=0) as file:
                while True:
                    total += file.write(b"x" * (1 << 20))
        except OSError:
            pass
        if total > 17 << 20:
            escaped(f"{total} bytes in /tmp")
        """,
        is_own_death_fine=True,
    ),
    _program(
        "a sparse file of a terabyte",
        """
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with open("sparse", "wb") as file:
            if works(file.truncate, 1 << 40):
                escaped("a file of a terabyte")
        """,
        is_about_host=False,
    ),
    _program(
        "takes all inodes",
        """
        count = 0
        while count < 50_000 and works(lambda: open(f"/work/i{count}", "x").close()):
            count += 1
        if count == 50_000:
            escaped("50,000 files")
        """,
        is_own_death_fine=True,
    ),
    _program(
        "takes all descriptors",
        """
        fds = []
        while len(fds) < 5000:
            try:
                fds.append(os.open("/dev/null", 0))
            except OSError:
                break
        else:
            escaped("5000 descriptors")
        """,
    ),
    _program(
        "folders 4000 deep",
        """
        for _ in range(4000):
            if not works(os.mkdir, "d" * 20):
                break
            os.chdir("d" * 20)
        """,
        is_own_death_fine=True,
    ),
    _program(
        "raises its own limits",
        """
        import resource
        for which in (resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU):
            soft, hard = resource.getrlimit(which)
            if works(resource.setrlimit, which, (hard + 1, hard + 1)):
                escaped("a higher limit")
        """,
        is_about_host=False,
    ),
    _program(
        "takes priority",
        """
        before = os.getpriority(os.PRIO_PROCESS, 0)
        if works(os.setpriority, os.PRIO_PROCESS, 0, before - 5):
            escaped("priority")
        if works(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(50)):
            escaped("real-time priority")
        """,
        is_about_host=False,
    ),
)

PROCESSES = (
    _program(
        "kills everyone",
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for pid in (NODE, 1, os.getppid()):
            works(os.kill, pid, signal.SIGKILL)
            works(os.kill, pid, signal.SIGTERM)
        os.write(1, b"tried")
        os.kill(-1, signal.SIGKILL)
        """,
        is_own_death_fine=True,
    ),
    _program(
        "kills its process group",
        "os.write(1, b'tried'); os.killpg(0, signal.SIGKILL)",
        is_own_death_fine=True,
    ),
    _program(
        "daemons in sessions of their own",
        """
        for _ in range(20):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    signal.signal(signal.SIGHUP, signal.SIG_IGN)
                    while True:
                        works(lambda: open("/work/alive", "w").write(str(time.time())))
                        time.sleep(0.01)
                os._exit(0)
        """,
    ),
    _program(
        "a daemon that keeps the output open",
        """
        if os.fork() == 0:
            os.setsid()
            time.sleep(1e6)
        os.write(1, b"tried")
        os._exit(0)
        """,
    ),
    _program(
        "kills its runner",
        """
        if os.fork() == 0:
            os.setsid()
            works(os.kill, os.getppid(), signal.SIGKILL)
            works(os.kill, 1, signal.SIGKILL)
            time.sleep(1e6)
        time.sleep(0.2)
        """,
        is_own_death_fine=True,
    ),
    _program(
        "reads the environment of others",
        """
        for pid in os.listdir("/proc"):
            if pid.isdigit() and int(pid) != os.getpid() and read_canary(f"/proc/{pid}/environ"):
                escaped(f"the environment of {pid}")
        """,
    ),
    _program(
        "sees processes of the host",
        """
        visible = [pid for pid in os.listdir("/proc") if pid.isdigit()]
        if len(visible) > 8:
            escaped(f"{len(visible)} processes")
        """,
    ),
    _program(
        "leaves through /proc",
        """
        for pid in [name for name in os.listdir("/proc") if name.isdigit()] + ["self"]:
            for way in ("root", "cwd"):
                if read_canary(f"/proc/{pid}/{way}{CANARY}"):
                    escaped(f"/proc/{pid}/{way}")
            if read_canary(f"/proc/{pid}/cwd/../../../..{CANARY}"):
                escaped("parents of a folder")
        """,
    ),
    _program(
        "leaves through inherited descriptors",
        """
        for fd in range(3, 1024):
            try:
                target = os.readlink(f"/proc/self/fd/{fd}")
            except OSError:
                continue
            if not target.startswith(("/proc", "/dev", "/work", "/usr", "pipe:", "anon_inode:")):
                escaped(f"descriptor {fd}: {target}")
        """,
    ),
    _program(
        "traces and reads other memory",
        """
        for pid in (NODE, 1, os.getppid()):
            if call(101, 16, pid, 0, 0) == 0:
                escaped(f"ptrace of {pid}")
            buffer = ctypes.create_string_buffer(8)
            vector = struct.pack("QQ", ctypes.addressof(buffer), 8)
            if call(310, pid, vector, 1, vector, 1, 0) > 0:
                escaped(f"memory of {pid}")
        """,
        is_about_host=False,
    ),
    _program(
        "runs a program from memory",
        """
        fd = os.memfd_create("cat", 0)
        with open("/bin/cat", "rb") as file:
            os.write(fd, file.read())
        done = subprocess.run([f"/proc/self/fd/{fd}", CANARY], pass_fds=[fd], capture_output=True)
        if SECRET.encode() in done.stdout:
            escaped("the canary")
        """,
    ),
    _program(
        "dumps core",
        """
        if os.fork() == 0:
            os.abort()
        _, status = os.wait()
        if os.WCOREDUMP(status) or any("core" in name for name in os.listdir("/work")):
            escaped("a core dump")
        """,
    ),
)

KERNEL = (
    _program(
        "mounts",
        """
        for source, kind, flags in ((b"none", b"tmpfs", 0), (b"/", b"", 4096), (b"p", b"proc", 0)):
            if call(165, source, b"/work", kind, flags, 0) == 0:
                escaped("mount")
        if call(166, b"/work", 2) == 0:
            escaped("umount")
        """,
        is_about_host=False,
    ),
    _program(
        "mounts by the new calls",
        """
        for number in (428, 429, 430, 431, 432, 433, 442):
            if call(number, -100, b"/", 0, 0, 0) != -errno.EPERM:
                escaped(f"system call {number}")
        """,
        is_about_host=False,
    ),
    _program(
        "makes namespaces",
        """
        for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x02000000):
            if call(272, flag) == 0:
                escaped(f"unshare {flag:x}")
            child = call(56, flag | signal.SIGCHLD, 0, 0, 0, 0)
            if child == 0:
                os._exit(0)
            if child > 0:
                escaped(f"clone {flag:x}")
        if call(435, ctypes.create_string_buffer(88), 88) != -errno.ENOSYS:
            escaped("clone3")
        """,
        is_about_host=False,
    ),
    _program(
        "enters namespaces",
        """
        for kind in os.listdir("/proc/1/ns"):
            try:
                fd = os.open(f"/proc/1/ns/{kind}", os.O_RDONLY)
            except OSError:
                continue
            if call(308, fd, 0) == 0:
                escaped(f"setns {kind}")
        """,
        is_about_host=False,
    ),
    _program(
        "changes its root",
        """
        os.makedirs("jail", exist_ok=True)
        here = os.open(".", os.O_RDONLY)
        if works(os.chroot, "jail"):
            os.fchdir(here)
            for _ in range(64):
                os.chdir("..")
            works(os.chroot, ".")
        if read_canary(CANARY):
            escaped("the canary")
        if call(155, b".", b".") == 0:
            escaped("pivot_root")
        """,
    ),
    _program(
        "opens files by handle",
        """
        handle = struct.pack("IIQ", 8, 1, 2)
        for fd in (os.open("/", 0), os.open("/usr", 0), os.open("/work", 0)):
            if call(304, fd, handle, 0) >= 0:
                escaped("open_by_handle_at")
        """,
    ),
    _program(
        "keys of the kernel",
        """
        for number, arguments in ((248, (b"user", b"x", b"y", 1, -3)), (250, (0, -3, 0, 0, 0)),
                                  (249, (b"user", b"x", None, -3))):
            if call(number, *arguments) not in (-errno.EPERM, -errno.ENOSYS):
                escaped(f"system call {number}")
        """,
        is_about_host=False,
    ),
    _program(
        "calls that widen the kernel's surface",
        """
        names = {321: "bpf", 298: "perf_event_open", 323: "userfaultfd", 425: "io_uring_setup",
                 426: "io_uring_enter", 438: "pidfd_getfd", 312: "kcmp", 300: "fanotify_init"}
        for number, name in names.items():
            if call(number, 0, 0, 0, 0, 0, 0) != -errno.EPERM:
                escaped(name)
        """,
        is_about_host=False,
    ),
    _program(
        "modules, reboot, swap, accounting",
        """
        for number in (175, 313, 176, 246, 320, 169, 167, 168, 163, 179, 103, 153, 172, 173):
            if call(number, 0, 0, 0, 0, 0) >= 0:
                escaped(f"system call {number}")
        """,
        is_about_host=False,
    ),
    _program(
        "sets the clock",
        """
        for number in (227, 164, 305, 159):
            if call(number, 0, struct.pack("qq", 0, 0) + bytes(256), 0) >= 0:
                escaped(f"system call {number}")
        """,
        is_about_host=False,
    ),
    _program(
        "calls of another architecture",
        """
        import mmap
        if call(39 | 0x40000000) > 0:
            escaped("x32")
        page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(bytes.fromhex("b814000000cd80c3"))
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        os.write(1, b"tried")
        if ctypes.CFUNCTYPE(ctypes.c_int)(address)() > 0:
            escaped("a 32-bit system call")
        """,
        is_about_host=False,
        is_own_death_fine=True,
    ),
    _program(
        "writes kernel settings",
        """
        for path in ("sys/kernel/core_pattern", "sys/kernel/modprobe", "sysrq-trigger",
                     "sys/vm/drop_caches", "sys/kernel/hostname", "self/oom_score_adj"):
            if writes(f"/proc/{path}", b"-1000" if "oom" in path else b"x"):
                escaped(path)
        """,
        is_about_host=False,
    ),
    _program(
        "control groups and devices in /sys",
        """
        for base in ("/sys/fs/cgroup", "/sys/kernel", "/sys/block", "/sys/devices"):
            for folder, _, names in os.walk(base):
                for name in names:
                    if name in ("release_agent", "uevent_helper", "cgroup.procs"):
                        if writes(os.path.join(folder, name), b"0"):
                            escaped(os.path.join(folder, name))
        """,
        is_about_host=False,
    ),
    _program(
        "devices of the host",
        """
        for name in ("mem", "kmem", "kmsg", "vda", "sda", "kvm", "loop-control", "vsock"):
            if works(os.open, f"/dev/{name}", os.O_RDWR):
                escaped(f"/dev/{name}")
        for where in ("/work/disk", "/tmp/disk", "/dev/shm/disk"):
            if works(os.mknod, where, 0o60666, os.makedev(254, 0)) and works(os.open, where, 0):
                escaped("a device node")
        if works(os.open, "/proc/kcore", os.O_RDONLY):
            escaped("/proc/kcore")
        """,
    ),
    _program(
        "devices that open the kernel",
        """
        for name in ("fuse", "net/tun", "uinput", "vhost-net", "mapper/control", "snapshot"):
            if works(os.open, f"/dev/{name}", os.O_RDWR):
                escaped(f"/dev/{name}")
        """,
        is_about_host=False,
    ),
    _program(
        "types into a terminal",
        """
        import fcntl
        for number in (0x5412, 0x541C):
            for path in ("/dev/tty", "/dev/console", "/proc/self/fd/0", "/dev/ptmx"):
                try:
                    fd = os.open(path, os.O_RDWR | os.O_NOCTTY)
                except OSError:
                    continue
                if works(fcntl.ioctl, fd, number, b"x"):
                    escaped(path)
        """,
        is_about_host=False,
    ),
)

FILES = (
    _program(
        "reads files of the host",
        """
        for path in (CANARY, "/etc/shadow", "/root", "/home", "/var/run", "/var/lib", "/boot"):
            if read_canary(path) or works(os.listdir, path) or works(open, path):
                escaped(path)
        """,
    ),
    _program(
        "changes programs of the host",
        """
        for path in ("/usr/bin/env", "/bin/sh", "/usr/lib", "/etc/passwd", "/etc/hosts",
                     "/etc/ld.so.preload", "/usr/lib/python3/dist-packages/x.pth", "/x"):
            if works(open, path, "ab") or works(os.chmod, path, 0o777) or works(os.unlink, path):
                escaped(path)
        """,
    ),
    _program(
        "becomes root by a set-uid program",
        """
        import shutil
        shutil.copy("/bin/sh", "/work/sh")
        os.chmod("/work/sh", 0o6755)
        works(os.chown, "/work/sh", 0, 0)
        commands = (["/work/sh", "-pc", "id -u"], ["su", "-c", "id -u"], ["sudo", "-n", "id", "-u"])
        for argv in commands:
            try:
                done = subprocess.run(argv, capture_output=True, stdin=subprocess.DEVNULL)
            except OSError:
                continue
            if done.stdout.strip() == b"0":
                escaped(argv[0])
        if works(os.setuid, 0) or works(os.setgroups, [0]):
            escaped("setuid")
        """,
    ),
    _program(
        "gives files away",
        """
        open("mine", "w").close()
        for owner in (0, 1, 65534):
            if works(os.chown, "mine", owner, owner):
                escaped(f"chown to {owner}")
        """,
    ),
    _program(
        "hard links out of its folder",
        """
        for path in (CANARY, "/usr/bin/env", "/etc/passwd", "/proc/1/environ"):
            if works(os.link, path, "/work/linked"):
                escaped(path)
        """,
    ),
    _program(
        "preloads a library for the next program",
        """
        with open("/work/evil.so", "w") as file:
            file.write("not a library")
        os.environ["LD_PRELOAD"] = "/work/evil.so"
        with open("/work/sitecustomize.py", "w") as file:
            file.write("print('ESCAPED: sitecustomize')")
        for name in (".profile", ".bashrc", ".pythonrc", ".pth"):
            with open(f"/work/{name}", "w") as file:
                file.write("echo ESCAPED: profile")
        """,
    ),
    _program(
        "redirects the next program's mounts",
        """
        import shutil
        for name in ("/tmp", "/work", "/dev/shm", "/run/secrets", "/run/sockets"):
            if works(os.rename, name, name + "2") or works(os.rmdir, name):
                escaped(name)
        """,
    ),
)

NETWORK = (
    _program(
        "ports of the host",
        """
        for family, address in ((socket.AF_INET, ("127.0.0.1", PORT)),
                                (socket.AF_INET6, ("::1", PORT)),
                                (socket.AF_INET, ("0.0.0.0", PORT))):
            if connects(family, address):
                escaped(address)
        """,
    ),
    _program(
        "addresses of the host",
        """
        import fcntl
        for _, name in socket.if_nameindex():
            if name != "lo" and works(socket.inet_aton, "127.0.0.1"):
                flags = struct.unpack("16xH14x", fcntl.ioctl(
                    socket.socket(), 0x8913, struct.pack("256s", name.encode())[:32]))[0]
                if flags & 1:
                    escaped(f"interface {name}")
        """,
    ),
    _program(
        "abstract sockets of the host",
        """
        if connects(socket.AF_UNIX, "\\0" + ABSTRACT):
            escaped("an abstract socket")
        """,
    ),
    _program(
        "the metadata address and the internet",
        """
        hosts = (("169.254.169.254", 80), ("1.1.1.1", 443), ("10.0.0.1", 80), ("8.8.8.8", 53))
        for address in hosts:
            if connects(socket.AF_INET, address) or connects(
                socket.AF_INET, address, socket.SOCK_DGRAM
            ):
                escaped(address)
        """,
    ),
    _program(
        "names of the network",
        """
        socket.setdefaulttimeout(1)
        for name in ("example.com", "metadata.google.internal"):
            if works(socket.gethostbyname, name):
                escaped(name)
        """,
    ),
    _program(
        "raw, packet and vsock sockets",
        """
        for family, kind in ((2, 3), (10, 3), (17, 3), (40, 1), (31, 3), (38, 5), (16, 3)):
            try:
                one = socket.socket(family, kind, 1 if family in (2, 10) else 0)
            except OSError:
                continue
            if family != 16:
                escaped(f"a socket of family {family}")
        """,
    ),
)

PROGRAMS = (*EXHAUSTION, *PROCESSES, *KERNEL, *FILES, *NETWORK)
