"""The drafter of given quality keeps its word: honest, as good as asked, deaf to the schedule."""

from __future__ import annotations

import itertools
import json
import runpy
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from faulty import open_tiny
from givenquality import CHILDREN, GivenQualityDrafter, Quality, family, probabilities
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.engine import Engine
from ondevice.errors import UnitFailed
from ondevice.records import DraftRow, NodeToken, Proposal
from ondevice.sampling import Law, SamplingParams
from ondevice.schedule import STRATEGIES, Sizes
from ondevice.session import Options
from ondevice.units import DraftRequest

VOCAB = 500
DRAWS = 20_000
PROMPT = [7, 8, 9]
TEXT = [int(token) for token in np.random.default_rng(5).integers(0, VOCAB, 40)]
LAW = Law(SamplingParams(), VOCAB)


def drafter(a: float = 0.7, step_ms: float = 0.0, seed: int = 0) -> GivenQualityDrafter:
    made = GivenQualityDrafter(Quality(a, step_ms, seed), VOCAB)
    made.learn(PROMPT, TEXT)
    return made


def draft(
    unit: GivenQualityDrafter,
    session: int,
    rows: Sequence[DraftRow],
    committed: Sequence[int] = (),
    *,
    children: int = CHILDREN,
    law: Law = LAW,
) -> list[Proposal]:
    entries = tuple(NodeToken(10_000 + i, token) for i, token in enumerate(committed))
    request = DraftRequest(session, 0, tuple(rows), entries, (), children, "coupled", law)
    return list(unit.draft(request).proposals)


def expand(known: int, path: Sequence[int], seed: int = 0) -> list[Proposal]:
    """Children of `path` below the first `known` tokens of the answer."""
    unit = drafter(seed=seed)
    session = unit.open_session()
    unit.prefill(session, [*PROMPT, *TEXT[: known - 1]], lambda: False)
    nodes = tuple(NodeToken(index, token) for index, token in enumerate(path))
    row = DraftRow(nodes[-1].node if nodes else 99, nodes)
    return draft(unit, session, [row], TEXT[known - 1 : known])


def what(proposals: Sequence[Proposal]) -> list[tuple[int, float]]:
    return [(each.token, each.log_q) for each in proposals]


# Honest, and as good as asked


@pytest.mark.parametrize("a", [0.05, 0.5, 0.7, 0.9])
def test_the_first_child_is_right_as_often_as_asked(a: float) -> None:
    rng = np.random.default_rng(1)
    hits = sum(family(rng, a, VOCAB, 3).tokens[0] == 3 for _ in range(DRAWS))
    assert hits / DRAWS == pytest.approx(a, abs=4 * (a * (1 - a) / DRAWS) ** 0.5)


@pytest.mark.parametrize("a", [0.05, 0.7])
def test_of_children_with_probability_p_a_part_p_is_right(a: float) -> None:
    rng = np.random.default_rng(2)
    stated, right = np.empty((DRAWS, CHILDREN)), np.empty((DRAWS, CHILDREN), bool)
    for row in range(DRAWS):
        drawn = family(rng, a, VOCAB, 3)
        stated[row], right[row] = np.exp(drawn.log_q[:CHILDREN]), np.array(drawn.tokens) == 3
    for rank in range(CHILDREN):
        for low, high in zip((0.0, 0.1, 0.3, 0.6, 0.9), (0.1, 0.3, 0.6, 0.9, 1.1), strict=True):
            chosen = (stated[:, rank] >= low) & (stated[:, rank] < high)
            if chosen.sum() < 100:
                continue
            expected = stated[chosen, rank]
            error = 4 * np.sqrt((expected * (1 - expected)).sum()) / chosen.sum()
            assert right[chosen, rank].mean() == pytest.approx(expected.mean(), abs=error)


def test_children_differ_and_carry_the_models_probabilities() -> None:
    assert probabilities(0.5) == pytest.approx((0.5, 0.225, 0.12375, 0.0680625, 0.037434375))
    rng = np.random.default_rng(3)
    for _ in range(200):
        drawn = family(rng, 0.7, VOCAB, 3)
        assert len(set(drawn.tokens)) == CHILDREN
        first, second = np.exp(drawn.log_q[:2])
        assert second == pytest.approx(0.45 * (1 - first))
        assert np.isfinite(drawn.log_q).all()


def test_proposals_are_ranked_and_their_gaps_are_those_of_their_probabilities() -> None:
    proposals = expand(5, [])
    assert [each.rank for each in proposals] == list(range(CHILDREN))
    for one, other in itertools.pairwise(proposals):
        assert one.gap == pytest.approx(max(0.0, one.log_q - other.log_q))


# Deaf to the schedule


@given(st.integers(1, 30), st.integers(0, 9))
@settings(deadline=None, max_examples=30)
def test_a_family_is_the_same_however_the_row_was_reached(known: int, deeper: int) -> None:
    committed = what(expand(known + deeper, []))
    assert what(expand(known, TEXT[known : known + deeper])) == committed


@given(st.permutations(range(6)))
@settings(deadline=None, max_examples=20)
def test_a_family_does_not_depend_on_the_other_rows_of_its_step(order: list[int]) -> None:
    unit = drafter()
    session = unit.open_session()
    unit.prefill(session, PROMPT, lambda: False)
    paths = [tuple(NodeToken(i, TEXT[1 + i]) for i in range(depth)) for depth in range(6)]
    rows = [DraftRow(paths[i][-1].node if paths[i] else 99, paths[i]) for i in order]
    found = draft(unit, session, rows, TEXT[:1])
    for row in rows:
        family_of_row = [each for each in found if each.parent == row.node]
        assert what(family_of_row) == what(expand(1 + len(row.path), []))


def test_a_chains_child_is_the_first_of_the_trees() -> None:
    unit = drafter()
    session = unit.open_session()
    unit.prefill(session, PROMPT, lambda: False)
    (only,) = draft(unit, session, [DraftRow(99, ())], TEXT[:1], children=1)
    assert what([only]) == what(expand(1, []))[:1]


def test_another_seed_draws_otherwise() -> None:
    assert what(expand(5, [])) != what(expand(5, [], seed=1))


def test_off_the_text_rows_have_children_of_the_same_law_and_know_nothing() -> None:
    wrong = [(TEXT[5] + 1) % VOCAB]
    proposals = expand(5, wrong)
    assert len(proposals) == CHILDREN
    assert what(proposals) == what(expand(5, wrong))
    assert what(proposals) != what(expand(6, []))


# A unit like any other


def test_a_step_takes_its_time_for_every_eight_rows_and_no_cpu() -> None:
    unit = drafter(step_ms=40)
    session = unit.open_session()
    unit.prefill(session, PROMPT, lambda: False)
    rows = [DraftRow(node, (NodeToken(node, node),)) for node in range(9)]
    start, cpu_start = time.monotonic(), time.thread_time()
    draft(unit, session, rows[:8], TEXT[:1])
    one = time.monotonic() - start
    draft(unit, session, rows)
    two = time.monotonic() - start - one
    assert one >= 0.04
    assert two >= 0.08
    assert time.thread_time() - cpu_start < 0.02
    assert unit.steps == 3


def test_what_breaks_the_contract_is_refused() -> None:
    unit = drafter()
    session = unit.open_session()
    with pytest.raises(UnitFailed, match="no text"):
        draft(unit, session, [DraftRow(1, ())])
    unit.prefill(session, PROMPT, lambda: False)
    draft(unit, session, [DraftRow(10_000, (NodeToken(10_000, 3),))], TEXT[:0])
    with pytest.raises(UnitFailed, match="another token"):
        draft(unit, session, [], [4])
    draft(unit, session, [DraftRow(2, (NodeToken(1, 3), NodeToken(2, 3)))])
    with pytest.raises(UnitFailed, match="came back"):
        draft(unit, session, [DraftRow(2, (NodeToken(1, 4), NodeToken(2, 3)))])
    with pytest.raises(UnitFailed, match="cannot keep"):
        unit.truncate(session, 99)
    with pytest.raises(UnitFailed, match="greedy"):
        draft(unit, session, [], law=Law(SamplingParams(temperature=1.0), VOCAB))
    with pytest.raises(UnitFailed, match="no session"):
        unit.truncate(session + 1, 0)


def with_double(pair: Path, a: float) -> tuple[Engine, GivenQualityDrafter]:
    with Engine.open_folder(pair, measure=False) as opened:
        vocab_size = opened.model.vocab_size
    double = GivenQualityDrafter(Quality(a, step_ms=0.5), vocab_size)
    return open_tiny(pair, drafter=lambda: double), double


@pytest.mark.parametrize("a", [0.05, 0.9])
def test_every_schedule_writes_the_verifiers_text_and_accepts_as_asked(
    tiny_pair: Path, a: float
) -> None:
    prompt, tokens = list(range(20, 40)), 160
    engine, double = with_double(tiny_pair, a)
    with engine:
        plain = engine.generate(prompt, Options(max_tokens=tokens, strategy="plain"))
        double.learn(prompt, plain.token_ids)
        assert len(plain.token_ids) == tokens
        for strategy in STRATEGIES:
            for children in (1, None):
                sizes = Sizes(4, depth=3) if strategy in ("sequential", "pipelined") else None
                options = Options(
                    max_tokens=tokens, strategy=strategy, children=children, sizes=sizes
                )
                answer = engine.generate(prompt, options)
                assert answer.token_ids == plain.token_ids
                assert "failed" not in answer.stats.reason
                if children == 1 and strategy == "sequential" and a == 0.9:
                    chain = (a + a**2 + a**3) / 3  # what follows a wrong token counts, too
                    assert answer.stats.draft_acceptance_rate == pytest.approx(chain, abs=0.12)


def test_the_benchmark_measures_every_schedule_and_its_ratios(
    tiny_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(__file__).parent / "benchmarks" / "given_quality.py"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Where is the river?\nCount to ten.\nGo on" + " and on" * 60, "utf-8")
    benchmark = runpy.run_path(str(file))
    benchmark["main"](
        [
            *(str(tiny_pair), "--a", "0.9", "--step-ms", "0.5", "--prompt-file", str(prompts)),
            *("--max-tokens", "100", "--context", "200", "--no-end", "--json"),
        ]
    )
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is True
    assert found["prompts"] == 2
    sides = {side["side"]: side for side in found["sides"]}
    for strategy in ("sequential", "pipelined"):
        for kind in ("chain", "tree"):
            side = sides[f"{strategy} {kind}"]
            assert side["tokens"] == 200
            assert side["num_accepted_draft_tokens"] > 0
    assert {"mlx-lm", "plain", "auto"} < set(sides)
    assert all(ratio["median"] > 0 for ratio in found["demands"].values())
    assert (found["a"], found["step_ms"]) == (0.9, 0.5)
