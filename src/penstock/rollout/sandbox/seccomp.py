# SPDX-License-Identifier: Apache-2.0
"""The seccomp filter of a sandbox: as the program that bubblewrap loads, and as the profile that
the engines of containers read.

Owns the list of refused system calls. A refused call fails with EPERM, so that programs can go on;
`clone3` is "not implemented", so that libraries fall back to `clone`, whose flags can be judged.
Calls of another architecture kill the program. Loads nothing itself.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Sequence
from typing import Any

from penstock.errors import SandboxError

_REFUSED = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "modify_ldt": (154, None),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}
"""Number on x86_64 and on aarch64."""
_CLONE, _CLONE3, _SOCKET, _IOCTL = (56, 220), (435, 435), (41, 198), (16, 29)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_NAMES_IN_PROFILES = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}
_LOW_HALF = 0xFFFFFFFF
"""The kernel reads 32 bits of a flag, a family or a request; a program may set the others."""
_NEW_NAMESPACES = 0x7E020000
"""Every CLONE_NEW… flag."""
_TERMINAL_IOCTLS = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX: they type into a terminal that others read."""
_SOCKET_FAMILIES = (1, 2, 10, 16)
"""Unix, IPv4, IPv6, netlink. Others, such as vsock, reach beyond a network namespace."""
_X32 = 0x40000000

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _refuse(code: int) -> bytes:
    return _op(_RETURN, _ERRNO | code)


def _refuse_number(number: int, code: int) -> bytes:
    return _op(_JUMP_EQUAL, number, 0, 1) + _refuse(code)


def _judge_argument(number: int, argument: int, tests: Sequence[bytes], otherwise: bytes) -> bytes:
    """For one system call: load the low half of an argument, the tests, then `otherwise`.
    Every path of it returns."""
    body = _op(_LOAD, _ARGUMENTS + 8 * argument) + b"".join(tests) + otherwise
    return _op(_JUMP_EQUAL, number, 0, len(body) // 8) + body


def build_profile(machine: str | None = None) -> dict[str, Any]:
    """The same rules for podman and docker. Their own profiles let a container make namespaces, or
    use io_uring. Elsewhere than on a known architecture the engine's own profile counts: empty."""
    arch = _NAMES_IN_PROFILES.get(machine or platform.machine())
    if arch is None:
        return {}
    bits = [1 << at for at in range(32) if _NEW_NAMESPACES & (1 << at)]
    families = [one for one in range(max(_SOCKET_FAMILIES)) if one not in _SOCKET_FAMILIES]
    beyond = {"index": 0, "value": max(_SOCKET_FAMILIES), "op": "SCMP_CMP_GT"}
    rules = [
        _rule(sorted(_REFUSED), errno.EPERM),
        _rule(["clone3"], errno.ENOSYS),
        *(_rule(["clone"], errno.EPERM, _masked(0, bit, bit)) for bit in bits),
        *(_rule(["ioctl"], errno.EPERM, _masked(1, _LOW_HALF, one)) for one in _TERMINAL_IOCTLS),
        *(_rule(["socket"], errno.EAFNOSUPPORT, _masked(0, _LOW_HALF, one)) for one in families),
        _rule(["socket"], errno.EAFNOSUPPORT, beyond),
    ]
    return {"defaultAction": "SCMP_ACT_ALLOW", "architectures": [arch], "syscalls": rules}


def _rule(names: Sequence[str], code: int, *args: dict[str, Any]) -> dict[str, Any]:
    return {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": code, "args": args}


def _masked(index: int, mask: int, value: int) -> dict[str, Any]:
    return {"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}


def build_filter(machine: str | None = None) -> bytes:
    """The program for this machine's architecture."""
    name = machine or platform.machine()
    if name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise SandboxError(
            f"no seccomp filter for the architecture {name}, only for {known}; run the node on one "
            "of these, or choose the back end runsc or container"
        )
    at, arch = _ARCHITECTURES[name]
    program = _op(_LOAD, _ARCH) + _op(_JUMP_EQUAL, arch, 1, 0) + _op(_RETURN, _KILL)
    program += _op(_LOAD, _NUMBER)
    program += _op(_JUMP_AT_LEAST, _X32, 0, 1) + _refuse(errno.ENOSYS)
    for numbers in _REFUSED.values():
        number = numbers[at]
        if number is not None:
            program += _refuse_number(number, errno.EPERM)
    program += _refuse_number(_CLONE3[at], errno.ENOSYS)
    allow = _op(_RETURN, _ALLOW)
    namespaces = [_op(_JUMP_ANY_BIT, _NEW_NAMESPACES, 0, 1), _refuse(errno.EPERM)]
    program += _judge_argument(_CLONE[at], 0, namespaces, allow)
    typing = [_op(_JUMP_EQUAL, one, 0, 1) + _refuse(errno.EPERM) for one in _TERMINAL_IOCTLS]
    program += _judge_argument(_IOCTL[at], 1, typing, allow)
    families = [_op(_JUMP_EQUAL, one, 0, 1) + allow for one in _SOCKET_FAMILIES]
    program += _judge_argument(_SOCKET[at], 0, families, _refuse(errno.EAFNOSUPPORT))
    return program + allow
