"""Loading an MLX folder: its manifest is checked first, mlx-lm does the rest."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx.nn.layers.base import Module
from mlx_lm.utils import load_model

from ondevice.artifact import VERIFIER_FILE
from ondevice.errors import ArtifactError, UnsupportedModel
from ondevice.verifierfolder import check_verifier_folder, check_verifier_weights


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory. context: in tokens. original_context: before RoPE scaling, 0 if none."""

    model: Module
    vocab_size: int
    context: int
    original_context: int


def load_folder(folder: Path) -> LoadedModel:
    """Load an MLX folder onto the calling thread's device.

    Raises ArtifactError for a folder that is incomplete or damaged, or whose files do not match
    its manifest (a folder that mlx-lm made has none); UnsupportedModel for a family mlx-lm lacks.
    """
    if (folder / VERIFIER_FILE).exists():
        check_verifier_weights(folder, check_verifier_folder(folder))
    config = _read_config(folder)
    try:
        model, _ = load_model(folder)
    except ValueError as error:
        if "not supported" in str(error):
            raise UnsupportedModel(f"{folder}: {_one_line(error)}") from error
        raise _damaged(folder, error) from error
    except (OSError, RuntimeError, KeyError, TypeError) as error:
        raise _damaged(folder, error) from error
    sizes = {**config, **(config.get("text_config") or {})}
    scaling = sizes.get("rope_scaling") or sizes.get("rope_parameters") or {}
    return LoadedModel(
        model=model,
        vocab_size=_size(sizes, "vocab_size", folder),
        context=_size(sizes, "max_position_embeddings", folder),
        original_context=int(scaling.get("original_max_position_embeddings") or 0),
    )


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else _one_line(error)
        raise ArtifactError(
            f"{folder} is no MLX model folder: its config.json cannot be read ({reason}); "
            "convert the pair again"
        ) from error
    if not isinstance(config, dict):
        raise ArtifactError(
            f"{folder / 'config.json'} is not a JSON object; convert the pair again"
        )
    return config


def _damaged(folder: Path, error: Exception) -> ArtifactError:
    return ArtifactError(
        f"{folder} cannot be loaded: {_one_line(error)}; the folder is incomplete or damaged, "
        "convert the pair again"
    )


def _size(config: dict[str, Any], key: str, folder: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ArtifactError(
            f"{folder / 'config.json'}: {key} must be a positive integer, got {value}"
        )
    return value


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
