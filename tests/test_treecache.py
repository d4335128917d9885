"""Tree rows equal decoding in order, and rollback is exact."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, load_prompt_cache, make_prompt_cache, save_prompt_cache
from verifying import (
    VARIANTS,
    VOCAB,
    assert_cache_equals_fresh_prefill,
    grafted,
    in_order,
    next_logits,
    oracle_of,
    sliding_model,
    tokens_of,
    trees,
    verifier_of,
)

from ondevice.records import ROOT_ROW, VerifyRow
from ondevice.rows import Instrumented, RowLayout, is_chain, tree_of
from ondevice.sampling import Law, SamplingParams
from ondevice.treecache import TreeCache
from ondevice.units import RunRequest, VerifyRequest
from ondevice.verifier import MLXVerifier


def never() -> bool:
    return False


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(rows=trees(), prompt_length=st.integers(1, 600))
def test_every_row_of_a_tree_has_the_logits_of_its_path_decoded_in_order(
    variant, rows, prompt_length
):
    verifier, prompt = verifier_of(variant), tokens_of(prompt_length, prompt_length)
    session = verifier.open_session()
    verifier.prefill(session, prompt, never)
    found = verifier.row_logits(session, rows)
    np.testing.assert_allclose(found, in_order(oracle_of(variant), prompt, rows), atol=1e-3, rtol=0)
    assert_cache_equals_fresh_prefill(verifier, session, oracle_of(variant), prompt)
    verifier.close_session(session)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("prefill"), st.integers(1, 40)),
        st.tuples(st.just("verify"), trees(most=16), st.integers(0, 5)),
        st.tuples(st.just("truncate"), st.integers(0, 30)),
        st.tuples(st.just("run"), st.integers(1, 6), st.integers(0, 6)),
    ),
    min_size=2,
    max_size=7,
)


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(steps=STEPS, seed=st.integers(0, 2**32 - 1))
def test_after_any_accepts_and_rollbacks_the_cache_is_that_of_a_fresh_prefill(variant, steps, seed):
    verifier, oracle = verifier_of(variant), oracle_of(variant)
    law, session = Law(SamplingParams(), VOCAB), verifier.open_session()
    committed = tokens_of(seed, 5)
    verifier.prefill(session, committed, never)
    for number, (step, *arguments) in enumerate(steps):
        root = tokens_of(seed + number, 1)[0]
        if step == "prefill":
            more = tokens_of(seed + number, arguments[0])
            assert verifier.prefill(session, more, never) == len(committed) + len(more)
            committed += more
        elif step == "truncate":
            del committed[max(1, len(committed) - arguments[0]) :]
            verifier.truncate(session, len(committed))
        elif step == "run":
            limit, ended_after = arguments
            request = RunRequest(session, number, root, limit, law)
            text = [root]
            for verdict in (run := verifier.run(request, never)):
                text += verdict.tokens
                if len(text) > ended_after:
                    break
            run.close()
            committed += text[:-1]
            verifier.truncate(session, len(committed))
        else:
            rows = with_right_path(arguments[0], oracle, committed, depth=arguments[1])
            request = VerifyRequest(session, number, rows, "coupled", law)
            (verdict,) = verifier.verify([request])
            assert len(verdict.accepted) >= arguments[1]
            committed += [rows[0].token, *verdict.tokens[:-1]]
        assert_cache_equals_fresh_prefill(verifier, session, oracle, committed)
    verifier.close_session(session)


def with_right_path(rows, oracle, committed, depth):
    """The tree with a path of the verifier's own choices put in, `depth` deep, out of order."""
    path: list[int] = []
    for _ in range(depth):
        text = [*committed, rows[0].token, *path]
        path.append(int(np.argmax(next_logits(oracle, text))))
    return grafted(rows, path)


def test_rows_of_a_sliding_window_layer_see_no_further_than_the_window():
    model = sliding_model(window=3)
    prompt, rows = tokens_of(1, 20), [VerifyRow(0, 7, ROOT_ROW)]
    rows += [
        VerifyRow(i, 10 + i, parent) for i, parent in enumerate((0, 0, 1, 2, 4, 3, 5), start=1)
    ]
    paths = [path_of(rows, row) for row in range(len(rows))]
    expected = np.stack([next_logits(model, prompt + path) for path in paths])
    verifier = MLXVerifier(model, VOCAB, 4096)
    assert verifier.shape == "tree"
    session = verifier.open_session()
    verifier.prefill(session, prompt, never)
    np.testing.assert_allclose(verifier.row_logits(session, rows), expected, atol=1e-4, rtol=0)


def path_of(rows, row):
    return [] if row < 0 else [*path_of(rows, rows[row].parent), rows[row].token]


def test_a_contiguous_path_is_committed_without_touching_an_array():
    cache = filled_cache(tokens=10, parents=(-1, 0, 1, 0))
    keys, values = cache.keys, cache.values
    before = [np.array(buffer) for buffer in (keys, values)]
    cache.commit(10, [0, 1, 2])
    assert cache.offset == 13
    assert cache.keys is keys
    assert cache.values is values
    for buffer, old in zip((keys, values), before, strict=True):
        np.testing.assert_array_equal(np.array(buffer), old)


def test_a_scattered_path_is_moved_together_and_the_prefix_stays():
    cache = filled_cache(tokens=10, parents=(-1, 0, 0, 2, 1))
    before = np.array(cache.keys)
    cache.commit(10, [0, 2, 3])
    kept = np.array(cache.keys_and_values()[0])
    np.testing.assert_array_equal(kept, before[:, :, [*range(10), 10, 12, 13]])


def filled_cache(tokens, parents):
    layout = RowLayout()
    cache = TreeCache(layout)
    mx.random.seed(1)
    cache.update_and_fetch(*(mx.random.normal((1, 2, tokens, 4)) for _ in range(2)))
    with layout.tree(parents, tokens):
        cache.update_and_fetch(*(mx.random.normal((1, 2, len(parents), 4)) for _ in range(2)))
    return cache


def test_the_mask_is_an_array_under_a_tree_and_mlx_lms_own_otherwise():
    layout = RowLayout()
    cache, theirs = TreeCache(layout), KVCache()
    for rows in (1, 4):
        assert cache.make_mask(rows) == theirs.make_mask(rows, return_array=False, window_size=None)
        window = cache.make_mask(rows, window_size=3)
        np.testing.assert_array_equal(
            window, theirs.make_mask(rows, return_array=False, window_size=3)
        )
    with layout.tree((-1, 0, 0), prefix=0):
        mask = np.array(cache.make_mask(3))
    np.testing.assert_array_equal(mask, [[1, 0, 0], [1, 1, 0], [1, 0, 1]])


def test_the_cache_grows_as_mlx_lms_does():
    ours, theirs = TreeCache(RowLayout()), KVCache()
    for rows in (1, 255, 1, 300, 7):
        for cache in (ours, theirs):
            cache.update_and_fetch(*(mx.zeros((1, 1, rows, 8)) for _ in range(2)))
        assert ours.keys.shape == theirs.keys.shape
        assert ours.nbytes == theirs.nbytes


def test_truncating_to_more_than_there_is_is_refused():
    cache = filled_cache(tokens=4, parents=(-1,))
    with pytest.raises(ValueError, match="cannot keep 6 of 5"):
        cache.truncate(6)


def test_a_converted_cache_is_saved_and_loaded_by_mlx_lm(tmp_path):
    verifier, oracle = verifier_of("gqa tied"), oracle_of("gqa tied")
    session = verifier.open_session()
    prompt = tokens_of(3, 30)
    verifier.prefill(session, prompt[:-1], never)
    save_prompt_cache(str(tmp_path / "cache.safetensors"), verifier.mlx_lm_cache(session))
    loaded = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    logits = np.array(oracle(mx.array([prompt[-1:]]), cache=loaded)[0, -1])
    np.testing.assert_allclose(logits, next_logits(oracle, prompt), atol=1e-4, rtol=0)


def test_undo_restores_the_models_modules_and_parameter_paths():
    model = sliding_model(window=8)
    before = dict_of_parameters(model)
    ropes = [layer.self_attn.rope for layer in model.layers]
    wrapped = Instrumented(model)
    wrapped.undo()
    assert dict_of_parameters(model).keys() == before.keys()
    assert all(
        layer.self_attn.rope is rope for layer, rope in zip(model.layers, ropes, strict=True)
    )
    assert make_prompt_cache(model)


def dict_of_parameters(model):
    from mlx.utils import tree_flatten

    return dict(tree_flatten(model.parameters()))


@given(rows=trees())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_depths_and_ancestors_are_those_of_the_parents(rows):
    parents = [row.parent for row in rows]
    depths, ancestors = tree_of(parents)
    for row in range(len(rows)):
        path, at = {row}, row
        while parents[at] >= 0:
            at = parents[at]
            path.add(at)
        assert set(np.flatnonzero(ancestors[row])) == path
        assert depths[row] == len(path) - 1
    assert is_chain(parents) == (list(depths) == list(range(len(rows))))
