# SPDX-License-Identifier: Apache-2.0
"""Control groups of version 2, which the machine of the tests may not have: on a plain folder."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.rollout.sandbox.cgroups import Parents, find_parents, group_of
from penstock.rollout.sandbox.owners import is_stale, new_name, prefix_of
from penstock.rollout.sandbox.types import Limits


def test_version_2_limits_memory_without_swap_and_processes(tmp_path: Path) -> None:
    parents = Parents(folders={"unified": tmp_path})
    group = parents.create(Limits(memory_mb=3, num_processes=5), own_processes=2)
    folder = group.folders["unified"]
    assert parents.has_memory
    assert (folder / "memory.max").read_text() == str(3 << 20)
    assert (folder / "pids.max").read_text() == "7"
    assert group.joins == [str(folder / "cgroup.procs")]


def test_version_2_says_what_was_used(tmp_path: Path) -> None:
    group = Parents(folders={"unified": tmp_path}).create(Limits(), own_processes=0)
    folder = group.folders["unified"]
    (folder / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1000000\n")
    (folder / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert group.cpu_used_s() == 1.5
    assert group.num_memory_kills() == 2


def test_a_host_without_control_groups_has_no_parents(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "mountinfo").write_text("22 1 254:0 / / rw - ext4 /dev/vda rw\n")
    parents = find_parents(tmp_path)
    assert parents.folders == {}
    assert not parents.has_memory
    assert parents.create(Limits(), own_processes=0).joins == []


def test_a_read_only_hierarchy_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/x\n4:memory:/x\n")
    missing = tmp_path / "none"
    (tmp_path / "mountinfo").write_text(
        f"31 22 0:26 / {missing} ro - cgroup2 cgroup2 rw\n"
        f"32 22 0:27 / {missing} ro - cgroup cgroup rw,memory\n"
    )
    assert find_parents(tmp_path).folders == {}


def test_the_group_that_an_engine_made_is_read(tmp_path: Path) -> None:
    """The processor time of a container, of all its processes together: v1 and v2."""
    for kind, line in (
        ("cpuacct", "2:cpu,cpuacct:/pod/x\n1:memory:/pod/x"),
        ("unified", "0::/pod/x"),
    ):
        proc, mount = tmp_path / kind, tmp_path / f"{kind}-mount"
        (proc / "7").mkdir(parents=True)
        (proc / "self").mkdir()
        (mount / "pod/x").mkdir(parents=True)
        (proc / "7" / "cgroup").write_text(line + "\n")
        name = "cgroup2 cgroup2 rw" if kind == "unified" else "cgroup cgroup rw,cpu,cpuacct"
        (proc / "self" / "mountinfo").write_text(f"31 22 0:26 / {mount} rw - {name}\n")
        (mount / "pod/x/cpuacct.usage").write_text("2500000000\n")
        (mount / "pod/x/cpu.stat").write_text("usage_usec 2500000\n")
        assert group_of(7, proc).cpu_used_s() == 2.5, kind
        assert group_of(8, proc).cpu_used_s() is None, "it has ended"


def test_only_names_of_dead_processes_are_stale() -> None:
    assert not is_stale(Path(new_name()))
    assert is_stale(Path(f"{prefix_of(os.getpid())}1-0"))  # it started later
    assert is_stale(Path(f"{prefix_of(99999999)}1-0"))
    assert not is_stale(Path("penstock-sandbox-1-99999999-1-0"))  # of another container
    assert not is_stale(Path("penstock-sandbox-0"))
    assert not is_stale(Path("another-1-2-3"))
