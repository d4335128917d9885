"""Laws of the drafter unit: whatever happened before, a proposal's log q is that of its path.

Each law runs on a numpy transformer that obeys the function's contract, and the central one also on
a real package in the emulator. The reference runs every path from its first token, without a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from drafter_oracle import NumpyRuntime, in_order_logits, log_softmax, numpy_drafter
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.drafter import CoreMLDrafter
from ondevice.errors import UnitFailed
from ondevice.records import DraftResult, DraftRow, NodeToken
from ondevice.sampling import Law, SamplingParams
from ondevice.slots import SINKS, tree_room
from ondevice.units import DraftRequest

MODEL = tiny.tiny_model(
    seed=3, hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48
)
GREEDY = Law(SamplingParams(), MODEL.config.vocab_size)
TOLERANCE = (
    0.02  # cos and sin are rounded to fp16; a row that sees one token too many is off by 0.1
)
ROUNDED = 0.03  # the package's weights are rounded to fp16 after folding


def never() -> bool:
    return False


@dataclass
class Session:
    """A coordinator's view of one drafter session, and when each row's keys were computed.

    windows: first position beyond SINKS that a row saw, by position (text) or node.
    """

    drafter: CoreMLDrafter
    model: tiny.TinyModel
    context: int
    tolerance: float = TOLERANCE
    handle: int = -1
    text: list[int] = field(default_factory=list)
    text_windows: list[int | None] = field(default_factory=list)
    tree: dict[int, tuple[int | None, int]] = field(default_factory=dict)  # (parent, token)
    node_windows: dict[int, int] = field(default_factory=dict)
    window: int = SINKS
    root: int = 0
    next_node: int = 1
    untold: list[NodeToken] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.handle = self.drafter.open_session()

    @property
    def pool(self) -> Any:
        return self.drafter._pool(self.handle)

    def path(self, node: int | None) -> list[int]:
        above: list[int] = []
        while node is not None:
            above.insert(0, node)
            node = self.tree[node][0]
        return above

    def prompt(self, tokens: list[int]) -> None:
        """A new turn: cut to the common prefix, prefill all but the last token."""
        told, common = len(self.text) - len(self.untold), 0
        while common < min(len(tokens) - 1, told) and tokens[common] == self.text[common]:
            common += 1
        self.drafter.truncate(self.handle, common)
        limit = self.context - tree_room(self.context)
        if self.window > SINKS and 2 * (common - self.window) < min(common, limit):
            self.text_windows[SINKS:] = [None] * (common - SINKS)
            self.window = SINKS
        self.text, self.text_windows = list(tokens), self.text_windows[:common]
        self.tree, self.node_windows, self.dropped, self.untold = {}, {}, [], []
        self.text.pop()
        self.tell()
        assert self.drafter.prefill(self.handle, tokens[common:-1], never) == len(self.text)
        self.commit([], tokens[-1])

    def tell(self) -> None:
        """The drafter hears of the whole text and computes what has no keys yet."""
        self.window = max(self.window, len(self.text) - self.context + tree_room(self.context))
        self.text_windows += [None] * (len(self.text) - len(self.text_windows))
        self.text_windows = [self.window if w is None else w for w in self.text_windows]

    def commit(self, path: Sequence[int], token: int) -> None:
        """Accept `path`; the new root is the node that holds `token`, if there is one."""
        parent = path[-1] if path else None
        known = [n for n, entry in self.tree.items() if entry == (parent, token)]
        self.root = known[0] if known else self.next_node
        self.next_node += not known
        accepted = [*path, *known]
        below = {n: self.path(n) for n in self.tree}
        self.untold += [NodeToken(n, self.tree[n][1]) for n in accepted]
        self.untold += [] if known else [NodeToken(self.root, token)]
        self.text += [self.tree[n][1] for n in path] + [token]
        self.text_windows += [self.node_windows.get(n) for n in accepted]
        self.text_windows += [] if known else [None]
        kept = [n for n in self.tree if known and self.root in below[n][:-1]]
        self.dropped += [n for n in self.tree if n not in kept and n not in accepted]
        entries = {n: self.tree[n] for n in kept}
        self.tree = {n: (None if p == self.root else p, t) for n, (p, t) in entries.items()}

    def draft(self, nodes: Sequence[int | None], children: int = 3, **changes: Any) -> DraftResult:
        """Expand nodes (None: the root); what failed to be told before is not told again."""
        rows = []
        for node in dict.fromkeys(nodes):
            path = tuple(NodeToken(n, self.tree[n][1]) for n in self.path(node))
            rows.append(DraftRow(self.root if node is None else node, path))
        values = {"children": children, "rule": "coupled", "law": GREEDY, **changes}
        committed, dropped = tuple(self.untold), tuple(self.dropped)
        self.untold, self.dropped = [], []
        result = self.drafter.draft(
            DraftRequest(self.handle, 5, tuple(rows), committed, dropped, **values)
        )
        self.tell()
        for node in nodes:
            for above in self.path(node):
                self.node_windows.setdefault(above, self.window)
        assert result.step == 5
        assert result.window == (0 if self.window == SINKS else self.window)
        return result

    def expected(self, node: int) -> Any:
        """log q after `node` (or the root's id), by running its whole path in order."""
        path = [] if node == self.root else self.path(node)
        windows = [w if w is not None else self.window for w in self.text_windows]
        windows += [self.node_windows[n] for n in path]
        windows[-1] = self.window
        tokens = self.text + [self.tree[n][1] for n in path]
        return log_softmax(in_order_logits(self.model, tokens, windows))

    def check(self, result: DraftResult, nodes: Sequence[int | None], children: int) -> None:
        parents = [self.root if node is None else node for node in dict.fromkeys(nodes)]
        assert len(result.proposals) == children * len(parents)
        for parent in parents:
            log_q = self.expected(parent)
            mine = [p for p in result.proposals if p.parent == parent]
            assert [p.rank for p in mine] == list(range(children))
            best = np.sort(log_q)[::-1]
            for proposal in mine:
                assert abs(proposal.log_q - log_q[proposal.token]) < self.tolerance
                assert abs(proposal.log_q - best[proposal.rank]) < self.tolerance
                gap = best[proposal.rank] - best[proposal.rank + 1]
                assert abs(proposal.gap - gap) < 2 * self.tolerance
        used = self.pool.occupied()
        assert len(set(used)) == len(used) == self.pool.context - self.pool.free
        held = {node for node in self.pool._nodes}
        assert held <= self.tree.keys()

    def add(self, parent: int | None, token: int) -> int:
        self.tree[self.next_node] = (parent, token)
        self.next_node += 1
        return self.next_node - 1


def random_life(session: Session, seed: int, events: int, longest: int) -> None:
    """A random history of turns, expansions, commits; every draft is checked."""
    rng = np.random.default_rng(seed)
    vocab = session.model.config.vocab_size
    session.prompt(rng.integers(0, vocab, int(rng.integers(1, longest))).tolist())
    for _ in range(events):
        nodes = list(session.tree)
        event = rng.choice(["draft", "draft", "grow", "commit", "plain", "turn"], p=_ODDS)
        if event == "draft":
            picked = [None, *rng.permutation(nodes).tolist()]
            wanted = picked[int(rng.integers(0, 2)) :][: int(rng.integers(1, 6))] or [None]
            result = session.draft(wanted)
            session.check(result, wanted, 3)
            for proposal in result.proposals:
                parent = None if proposal.parent == session.root else proposal.parent
                taken = (parent, proposal.token) in session.tree.values()
                if not taken and len(session.tree) < 24:
                    session.add(parent, proposal.token)
        elif event == "grow":  # a lookup path: several nodes at once that have no slots
            parent = None if not nodes else int(rng.choice(nodes))
            for token in rng.integers(0, vocab, 6).tolist():
                if len(session.tree) < 24:
                    parent = session.add(parent, token)
        elif event == "commit":
            path = session.path(int(rng.choice(nodes)) if nodes else None)
            below = [t for n, (p, t) in session.tree.items() if p == (path[-1] if path else None)]
            session.commit(path, below[0] if below and rng.random() < 0.7 else 1)
        elif event == "plain":  # the verifier ran alone for a while
            for token in rng.integers(0, vocab, int(rng.integers(1, 20))).tolist():
                session.commit([], token)
        else:
            keep = int(rng.integers(0, len(session.text) + 1))
            more = rng.integers(0, vocab, int(rng.integers(1, longest))).tolist()
            session.prompt(session.text[:keep] + more)


_ODDS = [0.3, 0.2, 0.1, 0.2, 0.12, 0.08]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31))
def test_every_log_q_is_that_of_its_path_in_order(seed: int) -> None:
    drafter, _ = numpy_drafter(MODEL, (1, 4, 8), (128, 512))
    random_life(Session(drafter, MODEL, 512), seed, events=14, longest=40)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31))
def test_every_log_q_is_right_when_the_text_outgrows_the_slots(seed: int) -> None:
    drafter, _ = numpy_drafter(MODEL, (1, 4, 8), (64, 128))
    random_life(Session(drafter, MODEL, 128), seed, events=12, longest=150)


@settings(deadline=None, max_examples=5)
@given(st.integers(0, 2**31))
def test_a_real_package_gives_the_same_laws(tiny_pair: Path, seed: int) -> None:
    with_package = CoreMLDrafter.open(tiny_pair / "drafter", tiny_pair / "verifier")
    full = tiny.tiny_model()
    model = tiny.TinyModel(full.config.with_layers(1), full.tensors)
    random_life(Session(with_package, model, 256, ROUNDED), seed, events=10, longest=80)
    with_package.close()


def test_the_reference_is_the_model_by_hand() -> None:
    tokens = list(range(7, 40))
    by_hand = tiny.logits_by_hand(MODEL, tokens)[-1]
    assert np.abs(in_order_logits(MODEL, tokens, [0] * 33) - by_hand).max() < 0.05
    assert np.abs(in_order_logits(MODEL, tokens, [20] * 33) - by_hand).max() > 0.1


def test_ancestors_without_slots_share_the_step_or_go_first() -> None:
    drafter, runtime = numpy_drafter(MODEL, (1, 4, 8), (128,))
    session = Session(drafter, MODEL, 128)
    session.prompt([1, 2, 3])
    node = None
    for token in range(20):
        node = session.add(node, token)
    runtime.calls.clear()
    third = session.path(node)[2]
    result = session.draft([third])
    assert (runtime.calls, result.catch_up_steps) == (["t4_s128"], 0)
    session.check(result, [third], 3)
    runtime.calls.clear()
    result = session.draft([node])
    assert (runtime.calls, result.catch_up_steps) == (["t8_s128", "t8_s128", "t1_s128"], 2)
    session.check(result, [node], 3)
    result = session.draft([node])  # its slot exists: it runs again without another
    session.check(result, [node], 3)
    assert session.pool.free == 128 - 23


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("output", ["k_new", "v_new", "chunk_max_0", "chunk_sum_0", "logits_0"])
def test_a_row_that_is_not_finite_fails_the_step_and_leaves_no_trace(
    output: str, bad: float
) -> None:
    drafter, runtime = numpy_drafter(MODEL)
    session = Session(drafter, MODEL, 64)
    session.prompt([1, 2, 3, 4])
    first = session.add(None, 9)
    second = session.add(first, 8)
    row = 1
    index = (1, 0, row, 3) if output in ("k_new", "v_new") else (0, 1, 0, row)
    runtime.spoil, runtime.spoil_with = {output: index}, bad
    before = {name: array.copy() for name, array in session.pool.buffers.items()}
    free = session.pool.free
    with pytest.raises(UnitFailed, match="not finite"):
        session.draft([first, second])
    assert session.pool.free == free
    assert all(np.array_equal(session.pool.buffers[name], before[name]) for name in before)
    runtime.spoil = {}
    session.untold = []  # what was told before the failure holds
    session.check(session.draft([first, second]), [first, second], 3)


def test_surplus_rows_may_hold_anything() -> None:
    drafter, runtime = numpy_drafter(MODEL)
    session = Session(drafter, MODEL, 64)
    session.prompt([1, 2, 3, 4])
    node = session.add(None, 9)
    runtime.spoil = {"k_new": (slice(None), slice(None), 2), "logits_0": (0, 0, 0, 3)}
    session.check(session.draft([node]), [node], 3)  # root and node in a step of four rows


def test_prefill_stops_between_steps_and_goes_on_later() -> None:
    drafter, runtime = numpy_drafter(MODEL, (1, 8), (256,))
    session = Session(drafter, MODEL, 256)
    tokens = list(range(50))
    steps = iter([False, False, True])
    assert drafter.prefill(session.handle, tokens, lambda: next(steps)) == 16
    assert drafter.prefill(session.handle, tokens[16:], never) == 50
    assert runtime.calls == ["t8_s256"] * 2 + ["t8_s256"] * 4 + ["t8_s256"]
    assert drafter.prefill(session.handle, [7], never) == 51
    assert runtime.calls[-1] == "t1_s256"
    session.text, session.text_windows = [*tokens, 7], [SINKS] * 51
    session.check(session.draft([None]), [None], 3)


def test_a_prefill_stopped_at_once_leaves_the_text_as_it_was() -> None:
    drafter, _ = numpy_drafter(MODEL, (1, 8), (64,))
    session = Session(drafter, MODEL, 64)
    assert drafter.prefill(session.handle, list(range(200)), lambda: True) == 0
    session.prompt([5, 6])
    session.check(session.draft([None]), [None], 3)


def test_sessions_do_not_touch_each_other() -> None:
    drafter, _ = numpy_drafter(MODEL, (1, 4), (64, 128))
    one, two = Session(drafter, MODEL, 128), Session(drafter, MODEL, 128)
    one.prompt([1, 2, 3])
    two.prompt(list(range(70)))
    for session in (one, two, one):
        session.check(session.draft([None]), [None], 3)
        session.commit([], 17)
    drafter.close_session(two.handle)
    one.check(one.draft([None]), [None], 3)
    with pytest.raises(UnitFailed, match="no session"):
        drafter.truncate(two.handle, 0)


def test_under_rejection_every_node_has_one_child_and_its_whole_row() -> None:
    drafter, _ = numpy_drafter(MODEL)
    session = Session(drafter, MODEL, 64)
    session.prompt([1, 2, 3])
    node = session.add(None, 9)
    law = Law(SamplingParams(temperature=1.0, seed=4), MODEL.config.vocab_size)
    result = session.draft([None, node], children=1, rule="rejection", law=law)
    assert [p.parent for p in result.proposals] == [session.root, node]
    for proposal in result.proposals:
        assert proposal.q is not None
        assert proposal.q.sum() == pytest.approx(1, abs=1e-5)
        assert np.abs(np.log(proposal.q) - session.expected(proposal.parent)).max() < TOLERANCE
        assert proposal.log_q == pytest.approx(np.log(proposal.q[proposal.token]), abs=1e-5)


def test_noise_and_penalty_follow_the_rows_own_position_and_path() -> None:
    drafter, _ = numpy_drafter(MODEL)
    session = Session(drafter, MODEL, 64)
    session.prompt([1, 2, 3])
    node = session.add(session.add(None, 9), 200)
    params = SamplingParams(temperature=1.0, seed=4, repetition_penalty=3.0, repetition_window=4)
    law = Law(params, MODEL.config.vocab_size)
    result = session.draft([node], children=4, law=law)
    logits = in_order_logits(MODEL, [1, 2, 3, 9, 200], [SINKS] * 5).astype(np.float32)
    log_p = law.log_p(logits, [1, 2, 3, 9, 200])
    best = np.argsort(-log_p)[:64]
    order = best[np.argsort(-(log_p + law.noise(5))[best])]
    assert [p.token for p in result.proposals] == order[:4].tolist()
    assert [p.log_q for p in result.proposals] == pytest.approx(log_p[order[:4]], abs=TOLERANCE)


def test_a_draft_without_text_is_refused_and_close_frees_the_runtime() -> None:
    drafter, runtime = numpy_drafter(MODEL)
    handle = drafter.open_session()
    with pytest.raises(UnitFailed, match="no text"):
        drafter.draft(DraftRequest(handle, 0, (DraftRow(0, ()),), (), (), 1, "coupled", GREEDY))
    drafter.close()
    assert runtime.closed
    assert isinstance(runtime, NumpyRuntime)
