# SPDX-License-Identifier: Apache-2.0
"""The cheapest chain of deltas, compared with an exhaustive search."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.weights.deltas.chain import MAX_STEPS, DeltaEntry, cheapest_chain, is_valid_chain

FILES = "abcdef"
Steps = list[DeltaEntry]


def step(base: str, target: str, num_bytes: int) -> DeltaEntry:
    return DeltaEntry(base=base, target=target, blob=f"{base}>{target}", bytes=num_bytes)


steps = st.lists(
    st.builds(step, st.sampled_from(FILES), st.sampled_from(FILES), st.integers(1, 9)), max_size=9
)


def find(target: str, have: str, known: Steps, below: int = 100) -> tuple[DeltaEntry, ...]:
    return cheapest_chain(
        target,
        lambda file: file in have,
        lambda file: [one for one in known if one.target == file],
        below=below,
    )


def costs(target: str, have: str, known: Steps, seen: str = "") -> list[int]:
    """Cost of every chain without a cycle."""
    found: list[int] = []
    for one in known:
        if one.target == target and one.base not in seen + target:
            found += [one.bytes] if one.base in have else []
            found += [one.bytes + c for c in costs(one.base, have, known, seen + target)]
    return found


@given(known=steps, have=st.sampled_from(["b", "bc", "f", ""]), below=st.integers(1, 40))
def test_it_is_the_cheapest_of_all(known: Steps, have: str, below: int) -> None:
    chain = find("a", have, known, below)
    best = min((cost for cost in costs("a", have, known) if cost < below), default=None)
    assert sum(one.bytes for one in chain) == (best or 0)
    assert bool(chain) == (best is not None)
    if chain:
        named = [named_step(one.base * 64, one.target * 64, one.bytes) for one in chain]
        assert is_valid_chain("a" * 64, named, [file * 64 for file in have], below=below)


def test_a_chain_without_end_ends() -> None:
    known = [step(str(number), str(number + 1), 1) for number in range(MAX_STEPS + 5)]
    long_gaps = str(MAX_STEPS + 5)
    chosen = cheapest_chain(
        long_gaps,
        lambda file: file == "0",
        lambda f: [s for s in known if s.target == f],
        below=10**9,
    )
    assert not chosen


def test_untrusted_chains_are_checked() -> None:
    a, b, c, d = (digit * 64 for digit in "abcd")
    good = [named_step(b, c, 3), named_step(c, a, 4)]
    assert is_valid_chain(a, good, [b], below=8)
    assert not is_valid_chain(a, good, [b], below=7), "it does not pay"
    assert not is_valid_chain(a, good, [c], below=8), "it begins elsewhere"
    assert not is_valid_chain(d, good, [b], below=8), "it ends elsewhere"
    assert not is_valid_chain(a, [good[1], good[0]], [b, c], below=8), "its steps do not meet"
    assert not is_valid_chain(a, [], [b], below=8)
    assert not is_valid_chain(a, [named_step(b, c, 9), named_step(c, a, -4)], [b], below=8)
    long = [named_step(f"{n:064}", f"{n + 1:064}", 1) for n in range(MAX_STEPS + 1)]
    assert all(one.target == other.base for one, other in pairwise(long))
    assert is_valid_chain(f"{MAX_STEPS:064}", long[:-1], ["0" * 64], below=10**6)
    assert not is_valid_chain(f"{MAX_STEPS + 1:064}", long, ["0" * 64], below=10**6)


def named_step(base: str, target: str, num_bytes: int) -> DeltaEntry:
    """A step between blobs with digests; only such are sound."""
    return DeltaEntry(base=base, target=target, blob="e" * 64, bytes=num_bytes)
