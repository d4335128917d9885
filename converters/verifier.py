"""Checkpoint -> verifier artifact: an MLX folder that `mlx_lm.load` opens as it is."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ondevice.artifact import VERIFIER_FILE, VerifierManifest, replacing
from ondevice.converters.checkpoint import Checkpoint, refuse_nonfinite, tensor_shapes
from ondevice.converters.mlxmodel import mlx_config
from ondevice.converters.progress import Progress
from ondevice.converters.tokenizer import save_tokenizer
from ondevice.errors import UnsupportedModel
from ondevice.models.config import ModelConfig
from ondevice.verifierfolder import files_sha256

if TYPE_CHECKING:
    import mlx.core as mx

Dtype = Literal["float32", "float16", "bfloat16"]
SHARD_BYTES = 5 * 1024**3  # the limit that Hugging Face and mlx-lm use


def write_verifier(
    checkpoint: Checkpoint,
    folder: Path,
    dtype: Dtype = "float32",
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> VerifierManifest:
    """Write `checkpoint` as an MLX folder at `folder`, whole or not at all.

    Weights are rounded to `dtype` and split into files of at most `shard_bytes` (a tensor is never
    split); one file's worth is in memory at a time. Raises what reading the checkpoint raises, and
    CacheUnwritable when the disk is full or refuses.
    """
    if checkpoint.config.traits.fused:
        raise UnsupportedModel(
            f"{checkpoint.label}: a verifier of family {checkpoint.config.family} is made from its "
            "Hugging Face folder only"
        )
    with replacing(folder) as scratch:
        scratch.mkdir()
        _write_json(scratch / "config.json", folder_config(checkpoint, dtype))
        _write_json(scratch / "generation_config.json", _generation_config(checkpoint))
        save_tokenizer(checkpoint.tokenizer, scratch)
        write_shards(
            partial(_array, checkpoint),
            tensor_shapes(checkpoint.config),
            scratch,
            dtype,
            checkpoint.label,
            progress,
            shard_bytes,
        )
        manifest = VerifierManifest(
            family=checkpoint.config.family,
            dtype=dtype,
            context=checkpoint.config.context,
            vocab_size=checkpoint.config.vocab_size,
            files_sha256=files_sha256(scratch),
            tokenizer_sha256=checkpoint.tokenizer_sha256,
            sources=checkpoint.sources,
            converter_version=version("ondevice"),
        )
        manifest.write(scratch / VERIFIER_FILE)
    return manifest


def _array(checkpoint: Checkpoint, name: str) -> mx.array:
    import mlx.core as mx

    return mx.array(checkpoint.tensor(name))


def folder_config(checkpoint: Checkpoint, dtype: Dtype) -> dict[str, Any]:
    """config.json of the verifier's folder."""
    content = {**mlx_config(checkpoint.config), "torch_dtype": dtype}
    if checkpoint.eos_token_ids:
        content["eos_token_id"] = list(checkpoint.eos_token_ids)
    if checkpoint.tokenizer.bos_token_id is not None:
        content["bos_token_id"] = checkpoint.tokenizer.bos_token_id
    return content


def _generation_config(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"eos_token_id": list(checkpoint.eos_token_ids)} if checkpoint.eos_token_ids else {}


def write_shards(
    read: Callable[[str], mx.array],
    shapes: Mapping[str, tuple[int, ...]],
    folder: Path,
    dtype: Dtype,
    label: str,
    progress: Progress | None,
    shard_bytes: int,
) -> None:
    """Write tensors rounded to `dtype` and, for several files, their index.

    Raises BadCheckpoint, naming the tensor and the model `label`, for one that is not finite.
    """
    import mlx.core as mx

    target = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}[dtype]
    sizes = {name: math.prod(shape) * target.size for name, shape in shapes.items()}
    total_bytes, done_bytes = sum(sizes.values()), 0
    plan = plan_shards(sizes, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(plan, start=1):
        shard = "model.safetensors"
        if len(plan) > 1:
            shard = f"model-{number:05}-of-{len(plan):05}.safetensors"
        tensors = {}
        for name in names:
            tensors[name] = read(name).astype(target)
            refuse_nonfinite(name, tensors[name], label)
            done_bytes += sizes[name]
            if progress is not None:
                progress(done_bytes, total_bytes)
        _save(folder / shard, tensors)
        weight_map |= dict.fromkeys(names, shard)
    if len(plan) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)


def _save(file: Path, tensors: dict[str, mx.array]) -> None:
    import mlx.core as mx

    try:
        mx.save_safetensors(str(file), tensors, metadata={"format": "mlx"})
    except RuntimeError as error:
        if "Unable to write" not in str(error):
            raise
        # MLX gives no errno: the disk is full, or has gone away.
        raise OSError(errno.ENOSPC, str(error)) from error


def tensor_bytes(config: ModelConfig, item_bytes: int) -> dict[str, int]:
    """Size of every tensor by name, at `item_bytes` a weight."""
    sizes = {}
    for name, shape in tensor_shapes(config).items():
        sizes[name] = math.prod(shape) * item_bytes
    return sizes


def plan_shards(sizes: dict[str, int], shard_bytes: int) -> list[list[str]]:
    """Names by file, in order: a file is closed before it would outgrow `shard_bytes`."""
    plan: list[list[str]] = []
    filled_bytes = 0
    for name, size_bytes in sizes.items():
        if not plan or filled_bytes + size_bytes > shard_bytes:
            plan.append([])
            filled_bytes = 0
        plan[-1].append(name)
        filled_bytes += size_bytes
    return plan


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
