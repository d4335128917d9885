"""Device profiles: complete, sourced, clear about wrong files; the laws that predictions keep."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.errors import BadRequest
from ondevice.models.devices import (
    Device,
    catalogue,
    device_names,
    known_device,
    known_workload,
    read_catalogue,
    workload_names,
)
from ondevice.models.predictions import PairBytes, PredictedCosts, pair_bytes, predict

TOML = Path(__file__).parent.parent / "models" / "devices.toml"
RAW: dict[str, Any] = tomllib.loads(TOML.read_text(encoding="utf-8"))
FAMILIES = {
    1: ["m1", "m1-pro", "m1-max", "m1-ultra"],
    2: ["m2", "m2-pro", "m2-max", "m2-ultra"],
    3: ["m3", "m3-pro", "m3-max", "m3-ultra"],
    4: ["m4", "m4-pro", "m4-max"],
    5: ["m5", "m5-pro", "m5-max"],
}


def test_the_families_from_m1_to_m5_are_there_oldest_first() -> None:
    assert device_names() == [name for family in FAMILIES.values() for name in family]
    for generation, names in FAMILIES.items():
        assert {known_device(name).generation for name in names} == {generation}


@pytest.mark.parametrize("name", device_names())
def test_every_figure_has_a_value_a_kind_and_a_citation(name: str) -> None:
    figures = known_device(name).figures()
    assert figures.keys() == RAW["devices"][name].keys() - {"name", "generation"}
    for figure in figures.values():
        assert figure.value > 0
        assert len(figure.source.split()) >= 2
        if figure.kind == "estimated":
            assert re.search(r"M[1-5]", figure.source), f"{figure}: estimated from what?"


def test_apples_own_figures_are_specifications() -> None:
    for name in device_names():
        device = known_device(name)
        for figure in (device.gpu_bandwidth_gb_s, device.gpu_cores):
            assert figure.kind == "specification"
            assert figure.source.startswith("Apple")


def test_every_listed_source_is_used_and_every_used_one_is_listed() -> None:
    used = {
        figure["source"]
        for device in RAW["devices"].values()
        for figure in device.values()
        if isinstance(figure, dict)
    }
    assert used == RAW["sources"].keys()


def test_the_neural_engine_never_streams_faster_than_the_memory() -> None:
    for name in device_names():
        device = known_device(name)
        assert device.ane_bandwidth_gb_s.value < device.gpu_bandwidth_gb_s.value


# Billions of parameters as the model cards state them; of Gemma 3 12B the text part.
PUBLISHED = {
    "qwen3-8b": 8.2,
    "qwen3-4b": 4.0,
    "qwen3-0.6b": 0.6,
    "gemma-3-12b": 11.8,
    "gemma-3-270m": 0.27,
    "llama-3.1-8b": 8.03,
    "llama-3.2-3b": 3.21,
    "llama-3.2-1b": 1.23,
    "qwen2.5-3b": 3.09,
    "qwen2.5-1.5b": 1.54,
    "qwen2.5-0.5b": 0.49,
}
UNTIED = {"qwen3-8b", "llama-3.1-8b"}


def test_sizes_of_networks_add_up_to_the_published_parameters() -> None:
    networks = catalogue().networks
    assert networks.keys() == PUBLISHED.keys()
    for name, billions in PUBLISHED.items():
        network = networks[name]
        embeddings = network.head_weights * (2 if name in UNTIED else 1)
        assert (network.layer_weights + embeddings) / 1e9 == pytest.approx(billions, rel=0.01)


def test_bytes_of_a_workload_are_weights_times_bits() -> None:
    pair = pair_bytes("gemma-3-12b-bf16")
    assert pair.verifier_bytes == 2 * pair.verifier_weights
    assert not pair.verifier_quantized
    assert pair.drafter_palettized
    # 48 layers of 8 heads of 256, keys and values, two bytes each; 40 layers keep 1024 tokens.
    assert pair.kv_bytes(100) == 48 * 8 * 256 * 4 * 100
    assert pair.kv_bytes(5000) == 8 * 256 * 4 * (8 * 5000 + 40 * 1024)
    assert pair_bytes("qwen3-8b-4bit").verifier_bytes == pytest.approx(7.568e9 * 4.5 / 8, rel=1e-4)


devices = st.sampled_from(device_names()).map(known_device)
workloads = st.sampled_from(workload_names()).map(pair_bytes)
LAW = settings(deadline=None, max_examples=60, derandomize=True)


def _costs(device: Device, pair: PairBytes) -> tuple[PredictedCosts, list[float]]:
    """The prediction and a sample of its costs."""
    costs = predict(device, pair)
    rows = (1, 2, 4, 8, 12, 16, 33, 96)
    verify = [costs.verify_ms(n, context) for n in rows for context in (0, 700, 9000)]
    return costs, verify + [costs.draft_ms(n) for n in (1, 8, 64)]


@LAW
@given(devices, workloads, st.integers(0, 20_000), st.integers(1, 64))
def test_more_rows_never_cost_less(
    device: Device, pair: PairBytes, context: int, rows: int
) -> None:
    costs = predict(device, pair)
    verify = [costs.verify_ms(n, context) for n in range(1, 129)]
    assert verify == sorted(verify)
    if rows > 1:
        assert costs.draft_ms(rows) >= costs.draft_ms(rows - 1)


@LAW
@given(devices, workloads, st.integers(1, 96), st.integers(0, 30_000), st.integers(0, 5000))
def test_a_longer_context_never_costs_less(
    device: Device, pair: PairBytes, rows: int, context: int, more: int
) -> None:
    costs = predict(device, pair)
    assert costs.verify_ms(rows, context + more) >= costs.verify_ms(rows, context)


SIZES = [
    field.name
    for field in dataclasses.fields(PairBytes)
    if field.name not in ("verifier_quantized", "drafter_palettized")
]


@LAW
@given(devices, workloads, st.sampled_from(SIZES), st.floats(1.0, 8.0))
def test_a_larger_pair_never_costs_less(
    device: Device, pair: PairBytes, size: str, factor: float
) -> None:
    value = getattr(pair, size)
    larger: Any = {size: type(value)(value * factor)}
    _, small = _costs(device, pair)
    _, large = _costs(device, dataclasses.replace(pair, **larger))
    assert all(more >= less for less, more in zip(small, large, strict=True))


@LAW
@given(devices, workloads, st.booleans(), st.floats(1.0, 4.0))
def test_more_bandwidth_never_costs_more(
    device: Device, pair: PairBytes, gpu: bool, factor: float
) -> None:
    name = "gpu_bandwidth_gb_s" if gpu else "ane_bandwidth_gb_s"
    figure = getattr(device, name)
    faster = device.model_copy(
        update={name: figure.model_copy(update={"value": figure.value * factor})}
    )
    _, slow = _costs(device, pair)
    _, fast = _costs(faster, pair)
    assert all(less <= more for less, more in zip(fast, slow, strict=True))


@LAW
@given(devices, workloads)
def test_the_other_unit_never_makes_one_faster(device: Device, pair: PairBytes) -> None:
    costs, _ = _costs(device, pair)
    assert costs.verify_slowdown >= device.gpu_slowdown_beside_ane.value
    assert 1.0 <= costs.draft_slowdown <= costs.verify_slowdown < 2.0


def test_a_step_is_never_faster_than_its_bytes_over_the_bandwidth() -> None:
    for name in device_names():
        device = known_device(name)
        for workload in workload_names():
            pair = pair_bytes(workload)
            costs = predict(device, pair)
            bandwidth = device.gpu_bandwidth_gb_s.value
            least = (pair.verifier_bytes + pair.kv_bytes(2000)) / bandwidth * 1e-6
            assert costs.verify_ms(1, 2000) > least
            least = pair.drafter_bytes / device.ane_bandwidth_gb_s.value * 1e-6
            assert costs.draft_ms(1) > least


def test_eight_rows_of_a_drafter_cost_about_one() -> None:
    for name in device_names():
        costs = predict(known_device(name), pair_bytes("qwen3-8b-4bit"))
        assert costs.draft_ms(2) == costs.draft_ms(8) < 1.06 * costs.draft_ms(1)


def test_a_prediction_says_that_it_is_one_and_what_it_guesses() -> None:
    costs = predict(known_device("m4-max"), pair_bytes("llama-3.2-3b-4bit"))
    assert costs.prediction is True
    assert "gpu_efficiency" in costs.estimated
    assert "gpu_bandwidth_gb_s" not in costs.estimated
    assert "ane_bandwidth_gb_s" not in costs.estimated


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(BadRequest, match=r"no device 'm9'.*expected one of m1, m1-pro"):
        known_device("m9")
    with pytest.raises(BadRequest, match=r"no workload 'x'.*expected one of qwen3-8b-4bit"):
        known_workload("x")
    with pytest.raises(BadRequest, match="no workload"):
        pair_bytes("x")


def test_steps_out_of_range_are_refused() -> None:
    costs = predict(known_device("m4"), pair_bytes("qwen3-8b-4bit"))
    for rows in (0, 65):
        with pytest.raises(BadRequest, match="expected 1 to 64"):
            costs.draft_ms(rows)
    with pytest.raises(BadRequest, match="expected at least 1 and 0"):
        costs.verify_ms(0, 10)
    with pytest.raises(BadRequest, match="expected at least 1 and 0"):
        costs.verify_ms(1, -1)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(BadRequest, match="kv_bytes_per_token"):
            dataclasses.replace(costs.pair, kv_bytes_per_token=wrong)
    with pytest.raises(BadRequest, match="verifier_bytes is 0"):
        dataclasses.replace(costs.pair, verifier_bytes=0)


def _m4_block() -> str:
    text = TOML.read_text(encoding="utf-8")
    found = re.search(r"\[devices\.m4\]\n(?:.+\n)+", text)
    assert found is not None
    used = re.findall(r'source = "([^"]+)"', found[0])
    sources = "".join(f'{name} = "from somewhere"\n' for name in dict.fromkeys(used))
    return f"[sources]\n{sources}\n{found[0]}"


BROKEN = [
    ('kind = "estimated"', 'kind = "guessed"', r"devices\.m4\..*kind: .*'guessed'"),
    ("generation = 4\n", "", r"devices\.m4\.generation: Field required"),
    ("generation = 4", "generation = 4\ncolour = 1", r"devices\.m4\.colour: Extra inputs"),
    ("value = 120", "value = -120", r"gpu_bandwidth_gb_s\.value: .*greater than 0, got -120"),
    ("value = 120", 'value = "120"', r"gpu_bandwidth_gb_s\.value: .*valid number, got '120'"),
    ("value = 120", "value = nan", r"gpu_bandwidth_gb_s\.value: .*finite number"),
    ("value = 0.72", "value = 1.2", r"devices\.m4: .*at most 1"),
    ("value = 1.03", "value = 0.9", r"devices\.m4: .*at least 1"),
    ('source = "apple"', 'source = "aple"', r"source: .*'aple' is neither a name in \[sources\]"),
    ("[devices.m4]", "[gadgets.m4]", "devices: Field required"),
    ("[sources]", "[sources", "expected a TOML file"),
    (
        "[devices.m4]",
        '[workloads.w]\ndescription = "d"\nverifier = "a"\nverifier_bits = 4\ndrafter = "b"\n'
        "drafter_bits = 4\ndrafter_head_bits = 4\ndrafter_slots = 64\n[devices.m4]",
        r"workload 'w': there is no \[networks\] entry 'a'",
    ),
]


@pytest.mark.parametrize(("old", "new", "message"), BROKEN, ids=lambda text: text[:24])
def test_a_wrong_file_is_named_with_its_first_wrong_entry(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "mine.toml"
    text = _m4_block()
    path.write_text(text)
    assert read_catalogue(path).device("m4").gpu_cores.value == 10
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(BadRequest, match=message) as caught:
        read_catalogue(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"none\.toml.*name another file"):
        read_catalogue(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadRequest, match=r"binary\.toml"):
        read_catalogue(tmp_path / "binary.toml")
