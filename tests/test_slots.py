"""Laws of the slot pool: who sits where, what a row sees, and that nothing is lost or shared."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.errors import UnitFailed
from ondevice.models.ane import MASKED
from ondevice.records import NodeToken
from ondevice.slots import SINKS, CacheShape, SlotPool, StepRow, tree_room

NODE_TAG = 10_000.0

SHAPE = CacheShape(layers=2, kv_heads=1, head_dim=4, dtype=np.dtype(np.float32))


def new_pool(*contexts: int) -> SlotPool:
    return SlotPool(SHAPE, contexts)


def write(pool: SlotPool, rows: list[StepRow], tags: list[float]) -> None:
    """Store rows whose keys are their tag and whose values are its negative."""
    keys = np.zeros((2, 1, len(rows), 4), np.float32)
    keys += np.asarray(tags, np.float32)[:, None]
    pool.write(rows, keys, -keys)


def compute_text(pool: SlotPool) -> None:
    rows = list(pool.missing())
    for start in range(0, len(rows), 8):
        chunk = rows[start : start + 8]
        pool.make_room(len(chunk), ())
        write(pool, chunk, [100.0 + row.position for row in chunk])


def seen(pool: SlotPool, row: StepRow) -> set[float]:
    """Tags of the slots that `row` sees in a step of its own."""
    mask = np.zeros((1, 1, 1, pool.context), np.float32)
    pool.fill_masks([row], mask, np.zeros((1, 1, 1, 1), np.float32))
    keys = pool.buffers["k_0"][0, 0, :, 0]
    assert np.array_equal(pool.buffers["v_1"][0, 0, :, 3], -keys)
    visible = keys[mask[0, 0, 0] == 0]
    assert len(set(visible)) == len(visible)
    return {float(tag) for tag in visible}


@dataclass
class Session:
    """A pool beside a plain record of the same text and tree."""

    pool: SlotPool
    text: list[int] = field(default_factory=list)
    tree: dict[int, tuple[int | None, int]] = field(default_factory=dict)  # (parent, token)
    next_node: int = 0

    def path(self, node: int | None) -> list[int]:
        above: list[int] = []
        while node is not None:
            above.insert(0, node)
            node = self.tree[node][0]
        return above

    def rows_for(self, node: int) -> list[StepRow]:
        """The node and those of its ancestors without a slot, after the text without slots."""
        rows = list(self.pool.missing())
        path = self.path(node)
        for depth, name in enumerate(path):
            if not self.pool.holds(name) or name == node:
                position = len(self.text) + depth
                rows.append(StepRow(self.tree[name][1], position, name, tuple(path[:depth])))
        return rows

    def tag(self, row: StepRow) -> float:
        return 100.0 + row.position if row.node is None else NODE_TAG + row.node

    def run(self, node: int) -> None:
        rows = self.rows_for(node)
        while rows:
            chunk, rows = rows[:8], rows[8:]
            self.pool.make_room(len(chunk), self.path(node))
            write(self.pool, chunk, [self.tag(row) for row in chunk])

    def add(self, parent: int | None, token: int) -> None:
        self.tree[self.next_node] = (parent, token)
        self.next_node += 1

    def commit(self, nodes: list[int], own: int) -> None:
        """Accept the path `nodes`, then a token of the verifier's own; the rest is dropped."""
        entries = [NodeToken(node, self.tree[node][1]) for node in nodes]
        entries.append(NodeToken(self.next_node, own))
        self.next_node += 1
        self.text += [entry.token for entry in entries]
        gone = [node for node in self.tree if node not in nodes]
        self.pool.commit(entries)
        self.pool.drop(gone)
        self.tree.clear()

    def truncate(self, length: int) -> None:
        self.pool.truncate(length)
        del self.text[length:]
        self.tree.clear()


def check(session: Session, node_tags: dict[int, float]) -> None:
    pool = session.pool
    used = pool.occupied()
    assert len(set(used)) == len(used)
    assert len(used) + pool.free == pool.context
    assert list(pool.tokens) == session.text
    missing = [row.position for row in pool.missing()]
    visible = [p for p in range(len(session.text)) if p < SINKS or p >= pool.window]
    assert visible[len(visible) - len(missing) :] == missing
    if pool.window:
        assert pool.window >= len(session.text) - pool.context + tree_room(pool.context)
    text = {node_tags.get(p, 100.0 + p) for p in visible[: len(visible) - len(missing)]}
    for node in [None, *session.tree]:
        path = tuple(session.path(node))
        below = StepRow(0, len(session.text) + len(path), 10**6, path)
        held = {NODE_TAG + name for name in path if pool.holds(name)}
        if len(held) == len(path):
            assert seen(pool, below) == text | held


operations = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(1, 40)),
        st.tuples(st.just("add"), st.integers(0, 200)),
        st.tuples(st.just("run"), st.integers(0, 200)),
        st.tuples(st.just("commit"), st.integers(0, 200)),
        st.tuples(st.just("commit"), st.integers(0, 200)),
        st.tuples(st.just("truncate"), st.integers(0, 200)),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=150)
@given(operations, st.sampled_from([(32,), (64,), (32, 64), (64, 128)]))
def test_no_slot_is_shared_or_leaked_and_contents_follow_their_holder(
    steps: list[tuple[str, int]], contexts: tuple[int, ...]
) -> None:
    session = Session(new_pool(*contexts))
    tags: dict[int, float] = {}  # committed position -> tag of the node that sat there
    for name, number in steps:
        nodes = sorted(session.tree)
        pick = nodes[number % len(nodes)] if nodes else None
        if name == "extend":
            session.tree.clear()
            session.text += range(number)
            session.pool.extend(range(number))
        elif name == "add":
            depth = len(session.path(pick)) if number % 3 else 0
            session.add(pick if 0 < depth < 8 else None, number)
        elif name == "run" and pick is not None:
            session.run(pick)
        elif name == "commit":
            path = session.path(pick)
            start = len(session.text)
            kept = {start + i: NODE_TAG + n for i, n in enumerate(path) if session.pool.holds(n)}
            whole = not list(session.pool.missing())
            session.commit(path, number)
            if whole:
                tags |= kept
        elif name == "truncate":
            length = number % (len(session.text) + 1)
            session.truncate(length)
        missing = {row.position for row in session.pool.missing()}
        tags = {p: t for p, t in tags.items() if p < len(session.text) and p not in missing}
        check(session, tags)


def test_a_row_sees_its_ancestors_and_never_a_sibling() -> None:
    session = Session(new_pool(64))
    session.text = [5, 6, 7]
    session.pool.extend(session.text)
    for parent in (None, 0, 0, 1):
        session.add(parent, 9)
    for node in range(4):
        session.run(node)
    text = {100.0, 101.0, 102.0}
    below = StepRow(1, 6, 99, (0, 1, 3))
    assert seen(session.pool, below) == text | {NODE_TAG, NODE_TAG + 1, NODE_TAG + 3}
    assert seen(session.pool, StepRow(1, 5, 98, (0, 2))) == text | {NODE_TAG, NODE_TAG + 2}


def test_the_root_run_again_does_not_see_its_own_slot() -> None:
    pool = new_pool(64)
    pool.extend([1, 2, 3])
    compute_text(pool)
    assert seen(pool, StepRow(3, 2)) == {100.0, 101.0}
    used = pool.occupied()
    write(pool, [StepRow(3, 2)], [7.0])
    assert pool.occupied() == used
    assert seen(pool, StepRow(4, 3, 1)) == {100.0, 101.0, 102.0}


def test_rows_of_one_step_see_each_other_only_upwards() -> None:
    pool = new_pool(64)
    pool.extend([1, 2])
    rows = [
        *pool.missing(),
        StepRow(3, 2, 10),
        StepRow(4, 2, 11),
        StepRow(5, 3, 12, (10,)),
    ]
    mask = np.zeros((1, 1, 8, 64), np.float32)
    new = np.zeros((1, 1, 8, 8), np.float32)
    pool.fill_masks(rows, mask, new)
    assert (mask == MASKED).all()
    expected = np.zeros((8, 8), bool)
    np.fill_diagonal(expected, True)
    expected[1, 0] = expected[2:5, :2] = expected[4, 2] = True
    assert np.array_equal(new[0, 0] == 0, expected)
    assert set(np.unique(new)) == {np.float32(MASKED), np.float32(0)}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_changes_nothing(bad: float) -> None:
    pool = new_pool(64)
    pool.extend([1, 2, 3])
    for plane in (0, 1):
        arrays = [np.ones((2, 1, 4, 4), np.float16) for _ in range(2)]
        arrays[plane][1, 0, 2, 3] = bad
        with pytest.raises(UnitFailed, match="not finite"):
            pool.write(list(pool.missing()), *arrays)
        assert pool.free == 64
        assert not pool.buffers["k_0"].any()
    arrays[1][1, 0, 2, 3] = 1
    arrays[1][1, 0, 3, 3] = bad  # a surplus row may hold anything
    pool.write(list(pool.missing()), *arrays)
    assert pool.free == 61


def test_text_longer_than_the_pool_keeps_the_oldest_four_and_the_newest() -> None:
    pool = new_pool(64)
    pool.extend(range(200))
    assert pool.window == 200 - 32
    compute_text(pool)
    expected = {100.0, 101.0, 102.0, 103.0} | {100.0 + p for p in range(168, 200)}
    assert seen(pool, StepRow(0, 200, 1)) == expected
    pool.commit([NodeToken(1, 7)])
    assert pool.window == 169


def test_cutting_back_into_lost_text_computes_it_again() -> None:
    pool = new_pool(64)
    pool.extend(range(200))
    compute_text(pool)
    pool.truncate(100)
    assert pool.window == 68
    assert [row.position for row in pool.missing()] == list(range(68, 100))
    pool.truncate(20)
    assert pool.window == 0
    assert [row.position for row in pool.missing()] == list(range(SINKS, 20))


def test_the_smallest_context_that_holds_text_and_tree_is_used() -> None:
    pool = new_pool(512, 2048)
    pool.extend(range(448))
    assert pool.context == 512
    pool.commit([NodeToken(0, 1)])
    assert (pool.context, pool.window) == (2048, 0)
    pool.truncate(300)
    assert pool.context == 2048
    pool.truncate(256)
    assert pool.context == 512


def test_a_wide_tree_takes_a_larger_context_then_old_text_then_idle_nodes() -> None:
    pool = new_pool(32, 64)
    pool.extend(range(16))
    compute_text(pool)
    for node in range(17):
        pool.make_room(1, ())
        write(pool, [StepRow(0, 16, node)], [NODE_TAG + node])
    assert (pool.context, pool.free) == (64, 31)
    pool.make_room(31, ())
    assert pool.window == 0
    pool.commit([NodeToken(100 + i, 0) for i in range(16)])
    compute_text(pool)
    pool.make_room(20, keep=(3,))
    assert pool.free == 20
    assert pool.window == 0  # 32 tokens are half of the slots: nodes go instead
    assert pool.holds(3)
    assert not pool.holds(0)
    with pytest.raises(UnitFailed, match="expand fewer nodes"):
        pool.make_room(40, keep=range(17))


def test_a_commit_that_contradicts_its_slot_is_refused_with_nothing_changed() -> None:
    pool = new_pool(64)
    pool.extend([1])
    compute_text(pool)
    write(pool, [StepRow(5, 1, 7)], [1.0])
    for wrong in ([NodeToken(7, 6)], [NodeToken(8, 5), NodeToken(7, 5)]):
        with pytest.raises(UnitFailed, match="node 7"):
            pool.commit(wrong)
        assert list(pool.tokens) == [1]
        assert pool.holds(7)


def test_a_node_accepted_below_one_without_slot_is_computed_again() -> None:
    pool = new_pool(64)
    pool.extend([1])
    compute_text(pool)
    write(pool, [StepRow(5, 1, 7), StepRow(6, 2, 8, (7,))], [1.0, 2.0])
    pool.drop([7])
    pool.commit([NodeToken(7, 5), NodeToken(8, 6)])
    assert [row.position for row in pool.missing()] == [1, 2]
    assert pool.free == 63


def test_the_text_that_the_runtime_reads_is_the_pools_own_memory() -> None:
    pool = new_pool(64)
    before = pool.buffers["k_1"]
    pool.extend([1])
    compute_text(pool)
    assert before is pool.buffers["k_1"]
    assert before.flags.c_contiguous
    assert before.shape == (1, 1, 64, 4)
    assert before[0, 0, pool.occupied()[0], 0] == 100.0
