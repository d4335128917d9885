"""The emulator against coremltools' own operator tests, and packages that coremltools made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ondevice.coreml.emulator import Emulator
from ondevice.errors import UnitFailed

TESTS = "coremltools.converters.mil.mil.ops.tests"


@pytest.mark.slow
def test_coremltools_own_operator_tests_pass_for_the_ops_that_are_claimed(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    pytest.importorskip("scipy")
    report = tmp_path / "ops.json"
    here = str(Path(__file__).parent)
    paths = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--continue-on-collection-errors",
        "--pyargs",
        TESTS,
    ]
    command += ["-p", "emulated_coremltools", "-p", "no:cacheprovider", "-c", os.devnull]
    subprocess.run(
        command,
        env={**os.environ, "OPS_REPORT": str(report), "PYTHONPATH": paths},
        cwd=tmp_path,
        check=False,
    )
    cases = json.loads(report.read_text())["all cases"]
    print({kind: cases.get(kind, 0) for kind in ("passed", "failed", "unclaimed", "other")})
    assert cases["passed"] > 1000
    assert cases["passed"] / (cases["passed"] + cases.get("failed", 0)) >= 0.95


def test_a_state_lives_from_one_prediction_to_the_next_and_in_no_other(tmp_path: Path) -> None:
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import Function, Program, types

    program = Program()
    inputs = {
        "x": mb.placeholder((2, 4), dtype=types.fp16),
        "sum": mb.state_tensor_placeholder((2, 4), dtype=types.fp16),
    }
    with Function(inputs, opset_version=ct.target.iOS18) as function:
        total = mb.add(x=mb.read_state(input=function.inputs["sum"]), y=function.inputs["x"])
        updated = mb.coreml_update_state(state=function.inputs["sum"], value=total)
        function.set_outputs([mb.mul(x=updated, y=np.float16(2), name="twice")])
    program.add_function("main", function)
    ct.convert(program, minimum_deployment_target=ct.target.iOS18, skip_model_load=True).save(
        str(tmp_path / "state.mlpackage")
    )
    emulator = Emulator.open(tmp_path / "state.mlpackage")
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    first, second = emulator.new_state("main"), emulator.new_state("main")
    for count in (1, 2, 3):
        (found,) = emulator.predict("main", {"x": x}, state=first).values()
        np.testing.assert_array_equal(found, 2 * count * x)
    (found,) = emulator.predict("main", {"x": x}, state=second).values()
    np.testing.assert_array_equal(found, 2 * x)
    np.testing.assert_array_equal(first["sum"], 3 * x)


@pytest.mark.parametrize("per_row", [False, True])
def test_integers_are_quantised_and_widened_as_their_definition_says(
    per_row: bool, tmp_path: Path
) -> None:
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb

    scale = np.float32([0.5, 0.25]) if per_row else np.float32(0.5)
    axis = {"axis": np.int32(0)} if per_row else {}

    @mb.program(input_specs=[mb.TensorSpec(shape=(2, 5))], opset_version=ct.target.iOS17)
    def program(x):
        whole = mb.quantize(input=x, scale=scale, output_dtype="int8", **axis)
        return mb.dequantize(input=whole, scale=scale, name="y", **axis)

    model = ct.convert(
        program,
        minimum_deployment_target=ct.target.iOS17,
        compute_precision=ct.precision.FLOAT32,
        skip_model_load=True,
    )
    model.save(str(tmp_path / "q.mlpackage"))
    x = np.random.default_rng(0).standard_normal((2, 5)).astype(np.float32) * 40
    (found,) = Emulator.open(tmp_path / "q.mlpackage").predict("main", {"x": x}).values()
    step = scale[:, None] if per_row else scale
    np.testing.assert_allclose(found, np.clip(np.rint(x / step), -128, 127) * step, atol=1e-5)


@pytest.mark.parametrize("place", [-1, 2])
def test_indices_outside_are_refused_where_the_op_asks_for_it(place: int, tmp_path: Path) -> None:
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    specs = [mb.TensorSpec(shape=(2, 3)), mb.TensorSpec(shape=(1,), dtype=types.int32)]
    specs.append(mb.TensorSpec(shape=(1, 3)))

    @mb.program(input_specs=specs, opset_version=ct.target.iOS17)
    def program(data, indices, updates):
        return mb.scatter(data=data, indices=indices, updates=updates, validate_indices=True)

    ct.convert(
        program,
        minimum_deployment_target=ct.target.iOS17,
        compute_precision=ct.precision.FLOAT32,
        skip_model_load=True,
    ).save(str(tmp_path / "s.mlpackage"))
    emulator = Emulator.open(tmp_path / "s.mlpackage")
    inputs = {"data": np.zeros((2, 3), np.float32), "updates": np.ones((1, 3), np.float32)}
    (found,) = emulator.predict("main", inputs | {"indices": np.int32([1])}).values()
    np.testing.assert_array_equal(found, [[0, 0, 0], [1, 1, 1]])
    with pytest.raises(UnitFailed, match="expected indices from 0 to 1, got"):
        emulator.predict("main", inputs | {"indices": np.int32([place])})


@pytest.mark.parametrize("integers_first", [False, True])
def test_a_product_of_floats_and_integers_has_the_type_that_is_declared(
    integers_first: bool, tmp_path: Path
) -> None:
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    weight = np.arange(8).reshape(2, 4).astype(np.float32 if integers_first else np.int32)
    given = types.int32 if integers_first else types.fp32

    @mb.program(
        input_specs=[mb.TensorSpec(shape=(3, 2), dtype=given)], opset_version=ct.target.iOS17
    )
    def program(x):
        return mb.matmul(x=x, y=weight)

    ct.convert(
        program,
        minimum_deployment_target=ct.target.iOS17,
        compute_precision=ct.precision.FLOAT32,
        skip_model_load=True,
        pass_pipeline=ct.PassPipeline.EMPTY,
    ).save(str(tmp_path / "m.mlpackage"))
    emulator = Emulator.open(tmp_path / "m.mlpackage")
    x = np.arange(6).reshape(3, 2).astype(np.int32 if integers_first else np.float32)
    (found,) = emulator.predict("main", {"x": x}).values()
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(found, x @ weight)


def test_functions_that_save_multifunction_merged_open_and_run(tmp_path: Path) -> None:
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb

    weight = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    descriptor = ct.utils.MultiFunctionDescriptor()
    for rows in (1, 5):

        @mb.program(input_specs=[mb.TensorSpec(shape=(rows, 3))], opset_version=ct.target.iOS18)
        def program(x):
            return mb.linear(x=x, weight=weight, name="y")

        model = ct.convert(
            program,
            minimum_deployment_target=ct.target.iOS18,
            compute_precision=ct.precision.FLOAT32,
            skip_model_load=True,
        )
        model.save(str(tmp_path / f"{rows}.mlpackage"))
        descriptor.add_function(str(tmp_path / f"{rows}.mlpackage"), "main", f"rows{rows}")
    descriptor.default_function_name = "rows1"
    ct.utils.save_multifunction(descriptor, str(tmp_path / "both.mlpackage"))
    emulator = Emulator.open(tmp_path / "both.mlpackage")
    for rows in (1, 5):
        x = np.random.default_rng(rows).standard_normal((rows, 3)).astype(np.float32)
        (found,) = emulator.predict(f"rows{rows}", {"x": x}).values()
        np.testing.assert_allclose(found, x @ weight.T, atol=1e-5)


def test_weights_that_coremltools_palettised_open_and_run(tmp_path: Path) -> None:
    import coremltools as ct
    import coremltools.optimize.coreml as cto
    from coremltools.converters.mil import Builder as mb

    weight = np.random.default_rng(0).integers(-4, 4, (64, 48)).astype(np.float32) / 4

    @mb.program(input_specs=[mb.TensorSpec(shape=(2, 48))], opset_version=ct.target.iOS18)
    def program(x):
        return mb.linear(x=x, weight=weight, name="y")

    model = ct.convert(
        program,
        minimum_deployment_target=ct.target.iOS18,
        compute_precision=ct.precision.FLOAT32,
        skip_model_load=True,
    )
    settings = cto.OpPalettizerConfig(mode="unique", weight_threshold=0)
    cto.palettize_weights(model, cto.OptimizationConfig(global_config=settings)).save(
        str(tmp_path / "palette.mlpackage")
    )
    emulator = Emulator.open(tmp_path / "palette.mlpackage")
    x = np.random.default_rng(1).standard_normal((2, 48)).astype(np.float32)
    (found,) = emulator.predict("main", {"x": x}).values()
    np.testing.assert_allclose(found, x @ weight.T, atol=1e-4)


# coremltools' own torch modules have invalid escapes, and torch calls its tracer deprecated.
@pytest.mark.filterwarnings("ignore")
def test_a_traced_torch_module_gives_what_torch_gives(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import coremltools as ct

    class Small(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = torch.nn.Embedding(32, 16)
            self.norm = torch.nn.LayerNorm(16)
            self.mix = torch.nn.Linear(16, 48)
            self.conv = torch.nn.Conv1d(16, 16, 3, padding=1)
            self.out = torch.nn.Linear(16, 8)

        def forward(self, tokens):
            x = self.norm(self.rows(tokens))
            heads = self.mix(x).reshape(1, 9, 3, 2, 8).permute(2, 0, 3, 1, 4)
            query, key, value = heads[0], heads[1], heads[2]
            weights = torch.softmax(query @ key.transpose(2, 3) * 8**-0.5, dim=-1)
            x = x + (weights @ value).transpose(1, 2).reshape(1, 9, 16)
            return self.out(self.conv(x.transpose(1, 2)).transpose(1, 2))

    torch.manual_seed(0)
    module, tokens = Small().eval(), torch.randint(0, 32, (1, 9))
    model = ct.convert(
        torch.jit.trace(module, tokens),
        inputs=[ct.TensorType(name="tokens", shape=(1, 9), dtype=np.int32)],
        minimum_deployment_target=ct.target.iOS18,
        compute_precision=ct.precision.FLOAT32,
        skip_model_load=True,
    )
    model.save(str(tmp_path / "torch.mlpackage"))
    emulator = Emulator.open(tmp_path / "torch.mlpackage")
    (found,) = emulator.predict("main", {"tokens": tokens.numpy().astype(np.int32)}).values()
    np.testing.assert_allclose(found, module(tokens).detach().numpy(), atol=1e-3)
