"""Reader of Hugging Face model folders: config.json, safetensors (sharded or not), tokenizer.

Folders of mlx-community are the same with quantised weights; they are dequantised as they are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ondevice.converters.checkpoint import Checkpoint, TensorStore, matrix_shapes
from ondevice.converters.configjson import read_eos_token_ids, read_json, read_model_config
from ondevice.converters.tokenizer import tokenizer_from_folder
from ondevice.errors import BadCheckpoint, UnsupportedModel
from ondevice.models.config import ModelConfig
from ondevice.models.family import MATRICES

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
_ADAPTER_FILES = ("adapter_config.json", "adapters.safetensors", "adapter_model.safetensors")
_FLOAT_DTYPES = ("F32", "F16", "BF16")
_PACKED_DTYPES = ("U32",)
_SCALES, _OFFSETS, _WEIGHT = ".scales", ".biases", ".weight"

Shape = tuple[int, ...]


def open_folder(folder: Path) -> Checkpoint:
    """Open the model in `folder`; raises as `open_checkpoint` does."""
    raw = read_folder_config(folder)
    config_file = folder / CONFIG_FILE
    config = read_model_config(raw, config_file)
    files = SafetensorsStore(folder)
    store: TensorStore = files
    if raw.get("quantization") is not None:
        store = QuantisedStore(files, raw["quantization"], config_file)
    elif raw.get("quantization_config") is not None:
        raise UnsupportedModel(
            f"{config_file}: weights quantised with quantization_config are not supported; use the "
            "unquantised model, a GGUF, or an mlx-community folder"
        )
    else:
        files.require_floats()
    if config.traits.fused:
        store = UnfusedStore(store, config)
    return Checkpoint(
        config=config,
        eos_token_ids=read_eos_token_ids(raw, folder),
        label=str(folder),
        store=store,
        files=(config_file, *files.files, folder / TOKENIZER_FILE),
        load_tokenizer=partial(tokenizer_from_folder, folder),
    )


def read_folder_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder that holds a whole model, with a tokenizer.

    Raises BadCheckpoint when one is missing, UnsupportedModel for an adapter.
    """
    if not (folder / CONFIG_FILE).is_file():
        for name in _ADAPTER_FILES:
            if (folder / name).is_file():
                raise UnsupportedModel(
                    f"{folder}: expected a model, got an adapter ({name}); merge it into its base "
                    "model first (mlx_lm.fuse)"
                )
    raw = read_json(folder / CONFIG_FILE)
    if not (folder / TOKENIZER_FILE).is_file():
        raise BadCheckpoint(
            f"{folder}: expected tokenizer.json, got no such file; download the whole repository"
        )
    return raw


class SafetensorsStore:
    """The safetensors files of a folder, one or sharded; headers are checked at once."""

    def __init__(self, folder: Path) -> None:
        self.where: dict[str, Path] = {}
        self._shapes: dict[str, Shape] = {}
        self._dtypes: dict[str, str] = {}
        self.files = _weight_files(folder)
        for file in self.files:
            self._read_header(file)

    def _read_header(self, file: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                    part = opened.get_slice(name)
                    self.where[name] = file
                    self._shapes[name] = tuple(part.get_shape())
                    self._dtypes[name] = part.get_dtype()
        except (SafetensorError, OSError) as error:
            raise BadCheckpoint(
                f"{file}: expected a whole safetensors file, got {file.stat().st_size} bytes that "
                f"do not read as one ({error}); download it again"
            ) from error

    def require_floats(self, further: tuple[str, ...] = ()) -> None:
        """UnsupportedModel unless every tensor is of a float type, or one of `further`."""
        for name, dtype in self._dtypes.items():
            if dtype not in (*_FLOAT_DTYPES, *further):
                raise UnsupportedModel(
                    f"{self.where[name]}: tensor {name} is of type {dtype}, supported: "
                    f"{', '.join(_FLOAT_DTYPES)}; use the unquantised model"
                )

    def shapes(self) -> Mapping[str, Shape]:
        """Shape of every tensor in the files, from their headers."""
        return self._shapes

    @property
    def elements(self) -> int:
        """Weights in all tensors together."""
        return sum(math.prod(shape) for shape in self._shapes.values())

    def dtype(self, name: str) -> str:
        """Type of the tensor `name`, as safetensors spells it."""
        return self._dtypes[name]

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor `name` as float32: one read of its bytes, nothing else of the file."""
        import mlx.core as mx

        return np.array(self.raw(name).astype(mx.float32))

    def raw(self, name: str) -> Any:
        """The tensor `name` as an mlx array in its own type, read when it is evaluated."""
        import mlx.core as mx

        # safetensors' numpy side knows no bfloat16; mx.load is lazy, so only this one is read.
        loaded = mx.load(str(self.where[name]))
        assert isinstance(loaded, dict)
        return loaded[name]


class QuantisedStore:
    """A folder that mlx-lm quantised: `X.weight` packed in 32-bit words, `X.scales`, `X.biases`.

    quantization: config.json's entry: group_size, bits, mode, and by module what differs.
    """

    def __init__(self, files: SafetensorsStore, quantization: Any, config_file: Path) -> None:
        files.require_floats((*_PACKED_DTYPES, "U8"))
        if not isinstance(quantization, dict):
            raise BadCheckpoint(
                f"{config_file}: expected quantization as an object, got {quantization!r}; "
                "download the model again"
            )
        self._files, self._quantization, self._config_file = files, quantization, config_file

    def shapes(self) -> Mapping[str, Shape]:
        """Shape of every tensor as it is once dequantised."""
        found = {}
        for name, shape in self._files.shapes().items():
            stem = name.removesuffix(_WEIGHT)
            if name.endswith((_SCALES, _OFFSETS)):
                continue
            if self._is_packed(stem):
                shape = (*shape[:-1], shape[-1] * 32 // self._settings(stem)["bits"])
            found[name] = shape
        return found

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor `name` in float32, dequantised where it is packed."""
        import mlx.core as mx

        stem = name.removesuffix(_WEIGHT)
        if not self._is_packed(stem):
            return self._files.read(name)
        scales = self._files.raw(stem + _SCALES)
        offsets = None
        if stem + _OFFSETS in self._files.shapes():
            offsets = self._files.raw(stem + _OFFSETS).astype(mx.float32)
            scales = scales.astype(mx.float32)
        dense = mx.dequantize(self._files.raw(name), scales, offsets, **self._settings(stem))
        return np.array(dense.astype(mx.float32))

    def _is_packed(self, stem: str) -> bool:
        return stem + _SCALES in self._files.shapes()

    def _settings(self, stem: str) -> dict[str, Any]:
        own = self._quantization.get(stem)
        merged = {**self._quantization, **(own if isinstance(own, dict) else {})}
        try:
            settings = {key: int(merged[key]) for key in ("group_size", "bits")}
        except (KeyError, TypeError, ValueError) as error:
            raise BadCheckpoint(
                f"{self._config_file}: expected group_size and bits for {stem}, got {merged}; "
                "download the model again"
            ) from error
        return {**settings, "mode": str(merged.get("mode", "affine"))}


class UnfusedStore:
    """The same tensors, with fused matrices cut into their parts."""

    def __init__(self, store: TensorStore, config: ModelConfig) -> None:
        self._store = store
        self._parts: dict[str, tuple[str, slice]] = {}
        rows = {name: shape[0] for name, shape in matrix_shapes(config).items()}
        for layer in range(config.num_layers):
            for module, parts in config.traits.fused.items():
                whole, at = f"model.layers.{layer}.{module}.weight", 0
                for part in parts:
                    name = f"model.layers.{layer}.{MATRICES[part]}.weight"
                    self._parts[name] = whole, slice(at, at + rows[part])
                    at += rows[part]

    def shapes(self) -> Mapping[str, Shape]:
        """Shape of every tensor by canonical name; a fused one of another height stays whole."""
        found = dict(self._store.shapes())
        heights: dict[str, int] = {}
        for whole, rows in self._parts.values():
            heights[whole] = max(heights.get(whole, 0), rows.stop)
        fits = {whole for whole, rows in heights.items() if found.get(whole, (0,))[0] == rows}
        for name, (whole, rows) in self._parts.items():
            if whole in fits:
                found[name] = (rows.stop - rows.start, *self._store.shapes()[whole][1:])
        return {name: shape for name, shape in found.items() if name not in fits}

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor `name` in float32."""
        if name not in self._parts:
            return self._store.read(name)
        whole, rows = self._parts[name]
        return self._store.read(whole)[rows]


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        single = folder / "model.safetensors"
        if not single.is_file():
            raise BadCheckpoint(
                f"{folder}: expected model.safetensors or model.safetensors.index.json, got "
                "neither; download the safetensors version of the model"
            )
        return [single]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadCheckpoint(f"{index}: expected a weight_map, got none; download it again")
    files = [folder / Path(str(name)).name for name in sorted(set(weight_map.values()))]
    for file in files:
        if not file.is_file():
            raise BadCheckpoint(
                f"{folder}: expected shard {file.name} of {len(files)} in {index.name}, got no "
                "such file; download it again"
            )
    return files
