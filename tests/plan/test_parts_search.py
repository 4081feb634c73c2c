"""Proves: the sets of parts that a plan chooses from are the best ones: no set of calls, none
inside another, drops more bytes for its seconds than what lies between neighbours on the hull.
"""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from memopt._plan.parts import _REGION_SECONDS, _Search, block_parts
from memopt.memory.calls.tree import CallTree, ModuleCall
from memopt.memory.speed import Speed

SPEED = Speed(flops=1e9, nbytes=1e12)


def call(
    path: str, parent: int, kept: int, flops: int, odd: bool, operators: int = 1
) -> ModuleCall:
    return ModuleCall(
        path=path,
        parent=parent,
        with_gradients=True,
        inputs=(),
        outputs=(),
        input_bytes=0,
        output_bytes=0,
        own_bytes=0,
        kept_bytes=kept,
        forward=0,
        backward=0,
        flops=flops,
        nbytes=0,
        operators=operators,
        returns_view=odd,
        writes_inputs=False,
        inputs_written=False,
    )


@st.composite
def trees(draw: st.DrawFn) -> CallTree:
    """A block, number 1, with up to seven calls in it. A call keeps what those inside keep, and
    more.
    """
    count = draw(st.integers(1, 7))
    parents = [draw(st.integers(1, number + 1)) for number in range(count)]
    own = [draw(st.integers(0, 100)) for _ in range(count)]
    work = [draw(st.integers(1, 100_000)) for _ in range(count)]
    odd = [draw(st.booleans()) and draw(st.booleans()) for _ in range(count)]
    kept, flops = [0, 0, *own], [0, 0, *work]
    for number in range(count + 1, 1, -1):
        kept[parents[number - 2]] += kept[number]
        flops[parents[number - 2]] += flops[number]
    paths = ["", "block"]
    for number, parent in enumerate(parents):
        paths.append(f"{paths[parent]}.m{number}")
    calls = [call("", -1, kept[1], 0, False), call("block", 0, kept[1], flops[1], False)]
    calls += [
        call(paths[n + 2], parents[n], kept[n + 2], flops[n + 2], odd[n]) for n in range(count)
    ]
    return CallTree(tuple(calls), (), 0, ())


def sets_of(tree: CallTree, least: float) -> list[tuple[float, int]]:
    """Seconds and bytes of all sets, by brute force."""
    mine = [c for c in tree.calls[2:] if not c.returns_view and c.kept_bytes >= least]
    found = []
    for size in range(len(mine) + 1):
        for some in combinations(mine, size):
            if not any(a.path.startswith(f"{b.path}.") for a in some for b in some):
                seconds = sum(c.flops / SPEED.flops + _REGION_SECONDS for c in some)
                found.append((seconds, sum(c.kept_bytes for c in some)))
    return found


@given(trees())
@settings(max_examples=150, deadline=None)
def test_no_set_lies_above_the_hull(tree: CallTree) -> None:
    children: dict[int, list[int]] = {}
    for number, one in enumerate(tree.calls):
        children.setdefault(one.parent, []).append(number)
    least = 0.03 * tree.calls[1].kept_bytes
    may_be = {one.path for one in tree.calls}
    hull = _Search(tree, SPEED, children, may_be, least).below(1)
    every = sets_of(tree, least)
    assert hull[-1].gain == max(gain for _, gain in every)
    for seconds, gain in every:
        before = max((p for p in hull if p.seconds <= seconds + 1e-15), key=lambda p: p.seconds)
        behind = next((p for p in hull if p.seconds > seconds + 1e-15), None)
        limit = float(before.gain)
        if behind is not None:
            share = (seconds - before.seconds) / (behind.seconds - before.seconds)
            limit += share * (behind.gain - before.gain)
        assert gain <= limit + 1e-6
    for point in hull:
        assert any(abs(s - point.seconds) < 1e-12 and g == point.gain for s, g in every)


@given(trees())
@settings(max_examples=50, deadline=None)
def test_levels_grow_and_none_is_inside_another(tree: CallTree) -> None:
    parts = block_parts(tree, SPEED, ["block"], ())["block"]
    for level in parts.levels:
        assert not any(a.startswith(f"{b}.") for a in level for b in level)
    assert len(parts.levels) <= 2
    assert parts.inside == (parts.levels[-1] if parts.levels else ())


def test_on_a_device_that_the_host_launches_fewer_operators_come_first() -> None:
    """One part is one large product, one is fifty small operators; both drop the same bytes."""
    calls = [
        *(call("", -1, 200, 0, False), call("block", 0, 200, 0, False)),
        call("block.product", 1, 100, 10_000, False, operators=1),
        call("block.small", 1, 100, 100, False, operators=50),
    ]
    tree = CallTree(tuple(calls), (), 0, ())
    few = {
        launch: block_parts(tree, Speed(1e9, 1e12, launch=launch), ["block"], ())["block"].levels[0]
        for launch in (0.0, 5e-6)
    }
    assert few == {0.0: ("small",), 5e-6: ("product",)}
