"""Each lint rule is broken by one small program, and by that program only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlpackages import function, half, mb, save, single, types

from ondevice.coreml import lint as rules
from ondevice.coreml.lint import Limits, Rule, lint
from ondevice.coreml.package import Package

FULL = (1, 64, 1, 32)  # a tensor that breaks no rule


def state(*shape: int) -> Any:
    return mb.state_tensor_placeholder(shape, dtype=types.fp16)


def infinite() -> Any:
    mask = np.zeros(FULL, np.float16)
    mask[0, 3, 0, 5] = -np.inf
    return function({"x": half(*FULL)}, lambda x: mb.add(x=x, y=mask, name="y"))


def lowest_float() -> Any:
    low = np.finfo(np.float16).min
    return function({"x": half(*FULL)}, lambda x: mb.maximum(x=x, y=low, name="y"))


def gathered() -> Any:
    table = np.ones((7, 64), np.float16)
    rows = np.zeros(32, np.int32)
    return function({"x": half(32, 64)}, lambda x: mb.add(
        x=x, y=mb.gather(x=mb.mul(x=x, y=table[:1]), indices=rows, axis=0, name="row"), name="y"
    ))  # fmt: skip


def integer() -> Any:
    return function({"x": half(*FULL)}, lambda x: mb.cast(
        x=mb.cast(x=x, dtype="int32", name="whole"), dtype="fp16", name="y"
    ))  # fmt: skip


def states(*shapes: tuple[int, ...]) -> Any:
    inputs = {f"s{i}": state(*shape) for i, shape in enumerate(shapes)}

    def body(x: Any, **given: Any) -> Any:
        for value in given.values():
            x = mb.add(x=x, y=mb.reduce_max(x=mb.read_state(input=value), keep_dims=True))
        return mb.relu(x=x, name="y")

    return function({"x": half(32, 32), **inputs}, body)


def blocks() -> Any:
    data = np.zeros((64, 64), np.int8).astype(types.np_int4_dtype)
    scale = np.ones((64, 2), np.float16)
    return function({"x": half(64, 64)}, lambda x: mb.add(
        x=x, y=mb.constexpr_blockwise_shift_scale(data=data, scale=scale), name="y"
    ))  # fmt: skip


def attention() -> Any:
    inputs = {name: half(1, 2, 32, 32) for name in ("query", "key", "value")}
    return function(
        inputs, lambda **given: mb.scaled_dot_product_attention(**given, name="attention")
    )


def plain(shape: tuple[int, ...] = FULL) -> Any:
    return function({"x": half(*shape)}, lambda x: mb.relu(x=x, name="y"))


def dynamic() -> Any:
    def body(x: Any) -> Any:
        count = mb.reduce_max(x=mb.cast(x=x, dtype="int32"), axes=[0, 1])
        return mb.tile(x=x, reps=mb.stack(values=[count, np.int32(1)], axis=0), name="y")

    return function({"x": half(2, 32)}, body)


def sliced() -> Any:
    return function({"x": half(1, 64, 1, 64)}, lambda x: mb.slice_by_index(
        x=x, begin=[0, 0, 0, 32], end=[1, 64, 1, 64], name="y"
    ))  # fmt: skip


def split_last() -> Any:
    return function({"x": half(1, 64, 1, 64)}, lambda x: mb.split(x=x, num_splits=2, axis=-1))


def fp32() -> Any:
    return function({"x": half(*FULL)}, lambda x: mb.cast(
        x=mb.cast(x=x, dtype="fp32"), dtype="fp16", name="y"
    ))  # fmt: skip


def epsilon() -> Any:
    eps = np.float16(6e-8)
    return function({"x": half(*FULL)}, lambda x: mb.rsqrt(x=x, epsilon=eps, name="y"))


PROGRAMS: dict[str, tuple[Any, set[Rule]]] = {
    "axis": (lambda: plain((1, 1, 1, 16416)), {rules.AXIS}),
    "row": (lambda: plain((1, 64, 1, 8)), {rules.ROW}),
    "fp32": (fp32, {rules.FP32}),
    "gather": (gathered, {rules.CPU_OP}),
    "integer": (integer, {rules.INTEGER}),
    "infinity": (infinite, {rules.INFINITY}),
    "lowest": (lowest_float, {rules.INFINITY}),
    "dynamic": (dynamic, {rules.DYNAMIC, rules.INTEGER}),
    "states": (lambda: states((32, 32), (2, 32, 32)), {rules.STATE_COUNT}),
    "state shape": (lambda: states((32, 48)), {rules.STATE_SHAPE, rules.ROW}),
    "slice": (sliced, {rules.SLICE}),
    "split": (split_last, {rules.SLICE}),
    "attention": (attention, {rules.ATTENTION}),
    "int4 blocks": (blocks, {rules.INT4_BLOCKS}),
    "epsilon": (epsilon, {rules.EPSILON}),
}


@pytest.mark.parametrize(("build", "broken"), PROGRAMS.values(), ids=list(PROGRAMS))
def test_a_program_breaks_its_rule_and_no_other(tmp_path: Path, build: Any, broken: Any) -> None:
    findings = lint(Package.open(save({"f": build()}, tmp_path / "p.mlpackage")))
    assert {finding.rule for finding in findings} == {rule.name for rule in broken}
    for finding in findings:
        assert finding.function == "f"
        assert finding.source
        assert "\n" not in str(finding)


def test_every_rule_is_broken_by_some_program() -> None:
    named = {rule.name for _, broken in PROGRAMS.values() for rule in broken}
    tested_by_limits = {rules.RANK.name, rules.WEIGHTS.name}
    assert named | tested_by_limits == {rule.name for rule in rules.RULES}


def test_a_good_program_has_no_finding(tmp_path: Path) -> None:
    path = save({"a": plain(), "b": plain((1, 64, 1, 64))}, tmp_path / "p.mlpackage")
    assert lint(Package.open(path)) == []


def test_weights_are_counted_once_a_function_against_the_limit(tmp_path: Path) -> None:
    weight = np.ones((64, 64, 1, 1), np.float16)

    def body(x: Any) -> Any:
        return mb.conv(x=mb.conv(x=x, weight=weight), weight=weight * 2, name="y")

    package = Package.open(
        save({"f": function({"x": half(*FULL)}, body)}, tmp_path / "p.mlpackage")
    )
    size = 2 * weight.nbytes
    assert lint(package, Limits(weight_bytes=size)) == []
    (finding,) = lint(package, Limits(weight_bytes=size - 1))
    assert (finding.rule, finding.op) == (rules.WEIGHTS.name, "")
    assert str(size) in finding.message


def test_rank_is_checked_against_the_limit(tmp_path: Path) -> None:
    """coremltools itself refuses to save rank 6, so the limit is lowered instead."""
    package = Package.open(save({"f": plain()}, tmp_path / "p.mlpackage"))
    findings = lint(package, Limits(rank=3))
    assert [(f.rule, f.op) for f in findings] == [(rules.RANK.name, "x"), (rules.RANK.name, "y")]


def test_a_later_engine_takes_longer_axes(tmp_path: Path) -> None:
    package = Package.open(save({"f": plain((1, 1, 1, 16416))}, tmp_path / "p.mlpackage"))
    assert lint(package, Limits(axis=65_536)) == []


def test_fp32_inputs_are_found_through_the_ops_that_use_them(tmp_path: Path) -> None:
    built = function({"x": single(*FULL)}, lambda x: mb.relu(x=x, name="y"))
    findings = lint(Package.open(save({"f": built}, tmp_path / "p.mlpackage")))
    assert [(f.rule, f.op) for f in findings] == [(rules.FP32.name, "y")]
