# SPDX-License-Identifier: Apache-2.0
"""The profile for engines of containers refuses what the filter of bubblewrap refuses."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.rollout.sandbox.seccomp import build_profile

CLONE_NEWUSER, CLONE_THREAD_FLAGS = 0x10000000, 0x3D0F00


def _is_refused(profile: dict[str, Any], name: str, *args: int) -> bool:
    """As libseccomp decides: the rules of a call are alternatives."""
    for rule in profile["syscalls"]:
        if name in rule["names"] and all(_holds(test, args) for test in rule["args"]):
            return True
    return False


def _holds(test: dict[str, Any], args: tuple[int, ...]) -> bool:
    index, value = int(test["index"]), int(test["value"])
    if test["op"] == "SCMP_CMP_GT":
        return args[index] > value
    assert test["op"] == "SCMP_CMP_MASKED_EQ"
    return args[index] & value == int(test["valueTwo"])


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_what_a_profile_refuses(machine: str) -> None:
    profile = build_profile(machine)
    for name in ("unshare", "mount", "io_uring_setup", "ptrace", "keyctl", "clone3", "bpf"):
        assert _is_refused(profile, name), name
    assert _is_refused(profile, "clone", CLONE_NEWUSER | 17)
    assert not _is_refused(profile, "clone", CLONE_THREAD_FLAGS)
    assert _is_refused(profile, "ioctl", 0, 0x5412) and not _is_refused(profile, "ioctl", 0, 0x5413)
    assert _is_refused(profile, "ioctl", 0, 1 << 40 | 0x5412), "the kernel reads the low half"
    allowed = [family for family in range(64) if not _is_refused(profile, "socket", family)]
    assert allowed == [1, 2, 10, 16]
    assert _is_refused(profile, "socket", 1 << 32 | 40)
    assert not _is_refused(profile, "read")
    assert len(profile["architectures"]) == 1, "calls of others kill"


def test_an_unknown_machine_keeps_the_profile_of_its_engine() -> None:
    assert build_profile("riscv64") == {}
