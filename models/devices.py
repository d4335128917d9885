"""Apple silicon as figures with their sources, and well-known networks and pairs (devices.toml)."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from ondevice.errors import BadRequest

Kind = Literal["specification", "measured by others", "estimated"]
_Found = TypeVar("_Found")


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Figure(_Entry):
    """A number about a device: what kind of knowledge it is, and a short citation.

    The source of an estimate says what it was estimated from.
    """

    value: Annotated[float, Field(gt=0)]
    kind: Kind
    source: str

    @field_validator("source")
    @classmethod
    def _is_a_citation(cls, source: str) -> str:
        if len(source.split()) < 2:
            raise ValueError(f"{source!r} is neither a name in [sources] nor a citation")
        return source


class Device(_Entry):
    """A chip.

    generation: n of Mn. Figures:
    - gpu_bandwidth_gb_s: bandwidth of the unified memory.
    - gpu_efficiency: part of it that MLX reaches while it decodes one token, kernel launches
      (`predictions.LAUNCH_MS_PER_LAYER`) taken off.
    - gpu_cores.
    - gpu_vector_tflops: of products of a few rows with 4-bit weights, where they are bound by
      arithmetic (MLX's `qmv`, and `qmv_wide` from M3 on).
    - gpu_tile_tflops: the same for MLX's matrix kernels (`qmm`), which pad rows to tiles of 32.
    - gpu_vector_rows: most rows that MLX gives to the vector kernels.
    - ane_bandwidth_gb_s: at which the Neural Engine streams fp16 weights.
    - ane_dispatch_ms: of the smallest program, on the direct route, without Core ML.
    - ane_tflops: fp16 arithmetic that the Neural Engine sustains.
    - gpu_slowdown_beside_ane: time of GPU work while the Neural Engine streams over its time alone,
      where memory has bandwidth for both.
    """

    name: str
    generation: Annotated[int, Field(ge=1)]
    gpu_bandwidth_gb_s: Figure
    gpu_efficiency: Figure
    gpu_cores: Figure
    gpu_vector_tflops: Figure
    gpu_tile_tflops: Figure
    gpu_vector_rows: Figure
    ane_bandwidth_gb_s: Figure
    ane_dispatch_ms: Figure
    ane_tflops: Figure
    gpu_slowdown_beside_ane: Figure

    @model_validator(mode="after")
    def _factors_are_factors(self) -> Self:
        if self.gpu_efficiency.value > 1:
            raise ValueError("gpu_efficiency is a part of the bandwidth: at most 1")
        if self.gpu_slowdown_beside_ane.value < 1:
            raise ValueError("gpu_slowdown_beside_ane is a slow-down: at least 1")
        return self

    def figures(self) -> dict[str, Figure]:
        """The figures by their names."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in values.items() if isinstance(value, Figure)}


_Size = Annotated[int, Field(ge=1)]


class Network(_Entry):
    """Sizes of a dense decoder with gated MLP, as its config.json states them.

    `local_layers` of the layers keep only the last `window` tokens of their cache.
    """

    name: str
    hidden_size: _Size
    intermediate_size: _Size
    num_layers: _Size
    num_heads: _Size
    num_kv_heads: _Size
    head_dim: _Size
    vocab_size: _Size
    local_layers: Annotated[int, Field(ge=0)] = 0
    window: Annotated[int, Field(ge=0)] = 0

    @property
    def head_weights(self) -> int:
        """Weights of the head: vocabulary x hidden size, also where the embedding is the same."""
        return self.vocab_size * self.hidden_size

    @property
    def layer_weights(self) -> int:
        """Weights of all layers' products; norms and biases are too few to count."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        attention = self.hidden_size * self.head_dim * heads
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def kv_bytes_per_layer(self) -> int:
        """Bytes of a token's keys and values in one layer, 16 bits each."""
        return 2 * 2 * self.num_kv_heads * self.head_dim


class Workload(_Entry):
    """A pair of networks and how their weights are stored, in bits a weight.

    Below 16 bits a verifier is quantized (MLX's affine groups) and a drafter in palettes.
    `drafter_slots`: cache slots of the drafter's function.
    """

    description: str
    verifier: str
    verifier_bits: Annotated[float, Field(gt=0)]
    drafter: str
    drafter_bits: Annotated[float, Field(gt=0)]
    drafter_head_bits: Annotated[float, Field(gt=0)]
    drafter_slots: _Size


class Catalogue(_Entry):
    """A whole devices.toml, the citations put in for the names of sources."""

    devices: dict[str, Device]
    networks: dict[str, Network] = {}
    workloads: dict[str, Workload] = {}

    @model_validator(mode="after")
    def _networks_exist(self) -> Self:
        for name, workload in self.workloads.items():
            for network in (workload.verifier, workload.drafter):
                if network not in self.networks:
                    raise ValueError(f"workload {name!r}: there is no [networks] entry {network!r}")
        return self

    def device(self, name: str) -> Device:
        """The device called `name`; BadRequest, with the names there are, when there is none."""
        return _named(self.devices, "device", name)

    def workload(self, name: str) -> Workload:
        """The workload called `name`; BadRequest, with the names, when there is none."""
        return _named(self.workloads, "workload", name)


def read_catalogue(file: Traversable) -> Catalogue:
    """A devices file (a `pathlib.Path` will do), for users who know better figures.

    Raises BadRequest, which names the file, the first wrong entry and what is expected, when the
    file cannot be read, is no TOML, or an entry is wrong, missing or unknown.
    """
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadRequest(
            f"{file}: expected a TOML file of devices, got: {error}; name another file or mend it"
        ) from error
    try:
        return Catalogue.model_validate(_with_citations(data))
    except ValidationError as error:
        raise BadRequest(f"{file}: {_first(error)}; correct that entry") from error


@cache
def catalogue() -> Catalogue:
    """The catalogue that comes with the package."""
    return read_catalogue(files("ondevice.models").joinpath("devices.toml"))


def known_device(name: str) -> Device:
    """A device of the package's own catalogue; BadRequest when there is none of that name."""
    return catalogue().device(name)


def known_workload(name: str) -> Workload:
    """A workload of the package's own catalogue; BadRequest when there is none of that name."""
    return catalogue().workload(name)


def device_names() -> list[str]:
    """Names of the known devices, from the oldest chip to the newest."""
    return list(catalogue().devices)


def workload_names() -> list[str]:
    """Names of the known workloads."""
    return list(catalogue().workloads)


def _named(entries: dict[str, _Found], what: str, name: str) -> _Found:
    if name not in entries:
        raise BadRequest(f"no {what} {name!r}: expected one of {', '.join(entries)}")
    return entries[name]


def _with_citations(data: dict[str, Any]) -> dict[str, Any]:
    """`data` without [sources], each figure's `source` replaced by the citation of that name."""
    citations = data.get("sources", {})

    def cited(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {
            key: citations.get(inner, inner)
            if key == "source" and isinstance(inner, str) and isinstance(citations, dict)
            else cited(inner)
            for key, inner in value.items()
        }

    return {key: cited(value) for key, value in data.items() if key != "sources"}


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"]) or "the file"
    got = "" if first["type"] in ("missing", "value_error") else f", got {first['input']!r}"
    return f"{place}: {first['msg']}{got}"
