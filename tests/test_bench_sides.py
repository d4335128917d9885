"""The sides of `bench`: one text, one clock, and the drafter's twin for mlx-lm."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
from faulty import open_tiny
from givenquality import GivenQualityDrafter, Quality

from ondevice.apps import bench as bench_command
from ondevice.apps.baselines import DRAFT_TOKENS, MlxLmPlain, MlxLmSpeculative
from ondevice.apps.bench import Load, bench
from ondevice.apps.questions import Question
from ondevice.apps.sides import Arrival, Drafting, OurSide, Side
from ondevice.apps.sides import Run as SideRun
from ondevice.apps.twin import mlx_twin
from ondevice.engine import Engine
from ondevice.records import DraftResult
from ondevice.schedule import STRATEGIES
from ondevice.session import Options
from ondevice.units import DraftRequest

QUESTIONS = (Question("1", "river", "Where is the river?"), Question("2", "ten", "Count to ten."))
PROMPT = list(range(20, 40))


@pytest.fixture(scope="module")
def mlx_lm_speculative(tiny_pair: Path, mlx_lm: MlxLmPlain) -> MlxLmSpeculative:
    twin = mlx_twin(tiny_pair / "drafter", tiny_pair / "verifier")
    return MlxLmSpeculative(mlx_lm, twin)


def test_all_sides_write_the_same_text(
    engine: Engine, mlx_lm: MlxLmPlain, mlx_lm_speculative: MlxLmSpeculative
) -> None:
    sides: list[Side] = [mlx_lm, mlx_lm_speculative]
    sides += [OurSide(engine, strategy) for strategy in STRATEGIES]
    outcome = bench(engine, "tiny", sides, Load(QUESTIONS, 24, repeats=2))
    assert outcome.passed
    assert [standing.side for standing in outcome.standings] == [side.name for side in sides]
    for standing in outcome.standings:
        assert (len(standing.runs), standing.tokens, standing.differences) == (4, 96, ())
        assert standing.decode_tok_s is not None
        assert sum(a.tokens for each in standing.runs for a in each.run.arrivals) == 96
        drafting = standing.drafting
        assert 0 <= drafting.accepted <= drafting.drafted
        if standing.side in ("mlx-lm", "plain"):
            assert drafting == Drafting()
        if standing.side == "mlx-lm speculative":
            assert drafting.steps > 0


def test_every_side_stops_at_the_end_token_and_keeps_it(
    tiny_pair: Path,
    engine: Engine,
    mlx_lm: MlxLmPlain,
    mlx_lm_speculative: MlxLmSpeculative,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = mlx_lm.answer(PROMPT, 24).tokens
    last = whole[10]
    until_end = whole[: whole.index(last) + 1]
    monkeypatch.setattr(mlx_lm, "end_tokens", frozenset({last}))
    monkeypatch.setattr(engine, "model", replace(engine.model, end_tokens=frozenset({last})))
    for side in (mlx_lm, mlx_lm_speculative, OurSide(engine, "pipelined")):
        run = side.answer(PROMPT, 24)
        assert run.tokens == until_end
        assert sum(arrival.tokens for arrival in run.arrivals) == len(until_end)


@pytest.mark.parametrize("count", [2, DRAFT_TOKENS])
def test_a_perfect_draft_model_is_accepted_whole(mlx_lm: MlxLmPlain, count: int) -> None:
    """With itself as the draft model mlx-lm commits its draft tokens and one more a round."""
    side = MlxLmSpeculative(mlx_lm, mlx_lm.model, count)
    run = side.answer(PROMPT, 4 * (count + 1))
    assert run.tokens == mlx_lm.answer(PROMPT, 4 * (count + 1)).tokens
    assert run.drafting == Drafting(4, 4 * count, 4 * count)
    assert [arrival.tokens for arrival in run.arrivals] == [count + 1] * 4


def test_nothing_of_an_answer_runs_on_after_it(tiny_pair: Path) -> None:
    class Watched(GivenQualityDrafter):
        busy = False

        def draft(self, request: DraftRequest) -> DraftResult:
            self.busy = True
            result = super().draft(request)
            self.busy = False
            return result

    double = Watched(Quality(0.7, step_ms=60), vocab_size=264)
    with open_tiny(tiny_pair, drafter=lambda: double) as engine:
        for _ in range(3):
            OurSide(engine, "pipelined").answer(PROMPT, 6)
            assert double.steps
            assert not double.busy


def test_a_rate_counts_what_came_after_the_first_arrival() -> None:
    arrivals = (Arrival(10**9, 4), Arrival(2 * 10**9, 3), Arrival(3 * 10**9, 1))
    run = SideRun(tuple(range(8)), 5 * 10**8, arrivals)
    assert run.decode_tok_s == 2.0
    assert run.ttft_ms == 500.0
    assert replace(run, arrivals=arrivals[:1]).decode_tok_s is None


# The drafter as an mlx-lm model


@pytest.mark.parametrize("changes", [{}, {"rope_scaling": tiny.LLAMA3, "tied_embeddings": False}])
def test_the_twin_computes_the_drafters_layers(tmp_path: Path, changes: dict[str, object]) -> None:
    """Against the formulas in float64; what differs is the package's rounding to fp16."""
    import mlx.core as mx

    from ondevice.converters.checkpoint import open_checkpoint
    from ondevice.converters.pair import write_pair
    from ondevice.models.pairs import DrafterRecipe

    model = tiny.tiny_model(seed=4, num_layers=3, **changes)
    checkpoint = open_checkpoint(tiny.write_folder(model, tmp_path / "llama"))
    recipe = DrafterRecipe(layers=(0, 2), row_counts=(1, 8), context_sizes=(64,))
    write_pair(checkpoint, tmp_path / "pair", name="three", drafter=recipe, quiet=True)
    twin = mlx_twin(tmp_path / "pair" / "drafter", tmp_path / "pair" / "verifier")
    tensors = {
        name.replace("layers.2.", "layers.1."): tensor
        for name, tensor in model.tensors.items()
        if "layers.1." not in name
    }
    chosen = tiny.TinyModel(model.config.with_layers(2), tensors)
    tokens = np.random.default_rng(0).integers(4, 200, 40).tolist()
    expected = tiny.logits_by_hand(chosen, tokens)
    found = np.array(twin(mx.array([tokens]))[0])
    assert np.abs(found - expected).max() < 0.01 * expected.std()
    whole = tiny.logits_by_hand(model, tokens)
    assert np.abs(found - whole).max() > 0.5 * expected.std()


def test_the_twin_proposes_what_the_emulated_drafter_proposes(tiny_pair: Path) -> None:
    import mlx.core as mx

    from ondevice.drafter import CoreMLDrafter
    from ondevice.records import DraftRow, NodeToken
    from ondevice.sampling import Law, SamplingParams

    twin = mlx_twin(tiny_pair / "drafter", tiny_pair / "verifier")
    drafter = CoreMLDrafter.open(tiny_pair / "drafter", tiny_pair / "verifier")
    law = Law(SamplingParams(), drafter.manifest.vocab_size)
    tokens = np.random.default_rng(1).integers(4, 200, 30).tolist()
    session = drafter.open_session()
    for position, token in enumerate(tokens):
        request = DraftRequest(
            session,
            0,
            (DraftRow(position, ()),),
            (NodeToken(position, token),),
            (),
            4,
            "coupled",
            law,
        )
        proposals = drafter.draft(request).proposals
        logits = twin(mx.array([tokens[: position + 1]]))[0, -1]
        log_q = np.array(logits - mx.logsumexp(logits))
        for each in proposals:
            assert each.log_q == pytest.approx(log_q[each.token], abs=0.01)  # angles in fp16
        assert proposals[0].log_q == pytest.approx(log_q.max(), abs=0.01)  # angles in fp16


def damaged(pair: Path, target: Path, **fields: object) -> Path:
    """A copy of `pair` whose drafter.json has other fields."""
    shutil.copytree(pair, target)
    file = target / "drafter" / "drafter.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return target


def test_a_drafter_without_a_twin_leaves_mlx_lm_speculative_out(
    tiny_pair: Path, tmp_path: Path, engine: Engine
) -> None:
    pair = damaged(tiny_pair, tmp_path / "pair", compression="palettized")
    reason = "stored as palettized"
    outcome = bench_command.bench_pair(engine, str(pair), ["plain"], Load(QUESTIONS[:1], 4))
    assert reason in outcome.left_out["mlx-lm speculative"]
    assert [standing.side for standing in outcome.standings] == ["mlx-lm", "plain"]


def test_mlx_lm_speculates_with_each_number_of_draft_tokens(
    tiny_pair: Path, engine: Engine
) -> None:
    load = Load(QUESTIONS[:1], 4)
    outcome = bench_command.bench_pair(engine, str(tiny_pair), ["plain"], load, (2, 3, 2))
    names = [standing.side for standing in outcome.standings]
    assert names == ["mlx-lm", "mlx-lm speculative, 2", "mlx-lm speculative", "plain"]


def test_our_own_answers_carry_their_statistics(engine: Engine) -> None:
    run = OurSide(engine, "sequential", children=1).answer(PROMPT, 8)
    assert run.answer is not None
    alone = engine.generate(PROMPT, Options(max_tokens=8, strategy="sequential", children=1))
    assert run.answer.token_ids == alone.token_ids == run.tokens
    assert run.answer.stats.num_spec_steps == run.drafting.steps
