"""A verifier from a Hugging Face or mlx-community folder: the model as its makers left it.

Any family that mlx-lm runs will do, quantised or not. Files are linked where the disk can, so that
a verifier of many gigabytes costs none; only with a `dtype` are the weights written anew.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import math
import os
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ondevice.artifact import (
    VERIFIER_FILE,
    SourceFile,
    VerifierManifest,
    file_sha256,
    replacing,
)
from ondevice.converters.checkpoint import refuse_nonfinite
from ondevice.converters.huggingface import CONFIG_FILE, SafetensorsStore, read_folder_config
from ondevice.converters.progress import Progress
from ondevice.converters.tokenizer import tokenizer_digest, tokenizer_from_folder
from ondevice.converters.verifier import SHARD_BYTES, Dtype, write_shards
from ondevice.errors import BadCheckpoint, UnsupportedModel
from ondevice.verifierfolder import files_sha256

_COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)


def adopt_verifier(
    source: Path, folder: Path, dtype: Dtype | None = None, progress: Progress | None = None
) -> VerifierManifest:
    """Write the model folder `source` as a verifier at `folder`, whole or not at all.

    dtype: round the weights to it; None leaves them as they are. Raises BadCheckpoint for files
    that are missing, damaged or not finite, UnsupportedModel for a family that mlx-lm lacks.
    """
    raw = read_folder_config(source)
    check_family(raw, source)
    store = SafetensorsStore(source)
    sizes = _sizes(raw, source)
    tokenizer = tokenizer_from_folder(source)
    config = _with_tying(raw, store)
    if dtype is not None:
        if _is_quantised(raw):
            raise UnsupportedModel(
                f"{source}: quantised weights cannot be rounded to {dtype}; leave out --dtype"
            )
        config["torch_dtype"] = dtype
        config.pop("dtype", None)
    with replacing(folder) as scratch:
        scratch.mkdir()
        (scratch / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name in _COMPANIONS:
            if (source / name).is_file():
                _link(source / name, scratch / name)
        if dtype is None:
            _take_weights(store, scratch, source, progress)
        else:
            write_shards(
                store.raw, store.shapes(), scratch, dtype, str(source), progress, SHARD_BYTES
            )
        require_loadable(scratch, source)
        manifest = VerifierManifest(
            family=str(raw["model_type"]),
            dtype=dtype or stored_dtype(raw, store),
            context=sizes["max_position_embeddings"],
            vocab_size=sizes["vocab_size"],
            files_sha256=files_sha256(scratch),
            tokenizer_sha256=tokenizer_digest(tokenizer),
            sources=[
                SourceFile(name=file.name, sha256=file_sha256(file))
                for file in (source / CONFIG_FILE, *store.files)
            ],
            converter_version=version("ondevice"),
        )
        manifest.write(scratch / VERIFIER_FILE)
    return manifest


def check_family(raw: Mapping[str, Any], source: Path) -> None:
    """UnsupportedModel unless mlx-lm has a module for the model."""
    from mlx_lm.utils import MODEL_REMAPPING

    family = str(raw.get("model_type"))
    module = MODEL_REMAPPING.get(family, family)
    if not module.isidentifier() or importlib.util.find_spec(f"mlx_lm.models.{module}") is None:
        raise UnsupportedModel(
            f"{source}: mlx-lm does not run model family {family!r}; take a verifier of another "
            "family, or a newer mlx-lm"
        )


def stored_dtype(raw: Mapping[str, Any], store: SafetensorsStore) -> str:
    """What the weights are stored in: "4-bit", "bfloat16", ..."""
    quantization = raw.get("quantization") or raw.get("quantization_config")
    if isinstance(quantization, dict):
        bits = quantization.get("bits")
        return f"{bits}-bit" if bits is not None else str(quantization.get("quant_method"))
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    counts: dict[str, int] = {}
    for name, shape in store.shapes().items():
        dtype = store.dtype(name)
        counts[dtype] = counts.get(dtype, 0) + math.prod(shape)
    most = max(counts, key=lambda dtype: counts[dtype])
    return names.get(most, most)


def _is_quantised(raw: Mapping[str, Any]) -> bool:
    return bool(raw.get("quantization") or raw.get("quantization_config"))


def _sizes(raw: Mapping[str, Any], source: Path) -> dict[str, int]:
    """Context and vocabulary; models that also see or hear keep them under text_config."""
    merged = {**raw, **(raw.get("text_config") or {})}
    for key in ("max_position_embeddings", "vocab_size"):
        if not isinstance(merged.get(key), int) or merged[key] < 1:
            raise BadCheckpoint(
                f"{source / CONFIG_FILE}: expected {key} as a positive integer, got "
                f"{merged.get(key)!r}; download the model again"
            )
    return merged


def _with_tying(raw: Mapping[str, Any], store: SafetensorsStore) -> dict[str, Any]:
    """config.json with `tie_word_embeddings` said outright: mlx-lm and transformers default apart.

    Raises BadCheckpoint when the weights have no head and the configuration says they do.
    """
    has_head = any(name.endswith("lm_head.weight") for name in store.shapes())
    place = raw.get("text_config") if isinstance(raw.get("text_config"), dict) else raw
    assert place is not None
    stated = place.get("tie_word_embeddings", raw.get("tie_word_embeddings"))
    if stated is False and not has_head and place.get("model_type") != "gemma3_text":
        raise BadCheckpoint(
            f"{store.files[0].parent}: config.json says tie_word_embeddings false, but the weights "
            "have no lm_head.weight; configuration and weights are not of the same model"
        )
    if stated is not None or place is not raw:
        return dict(raw)
    return {**raw, "tie_word_embeddings": not has_head}


def _take_weights(
    store: SafetensorsStore, scratch: Path, source: Path, progress: Progress | None
) -> None:
    total = sum(file.stat().st_size for file in store.files)
    done = 0
    names_of: dict[Path, list[str]] = {}
    for name, file in store.where.items():
        names_of.setdefault(file, []).append(name)
    for file in store.files:
        for name in names_of.get(file, []):
            refuse_nonfinite(name, store.raw(name), str(source))
        _link(file, scratch / file.name)
        done += file.stat().st_size
        if progress is not None:
            progress(done, total)
    index = source / "model.safetensors.index.json"
    if index.is_file():
        _link(index, scratch / index.name)


def _link(source: Path, target: Path) -> None:
    """A second name of the file where the disk can give one, else a copy."""
    try:
        os.link(source.resolve(), target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        shutil.copyfile(source, target)


def require_loadable(folder: Path, source: Path) -> None:
    """BadCheckpoint unless mlx-lm takes the weights: every name and shape; none is read."""
    from mlx_lm.utils import load_model

    try:
        load_model(folder, lazy=True)
    except (OSError, RuntimeError, KeyError, TypeError, ValueError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise BadCheckpoint(
            f"{source}: mlx-lm cannot load it ({reason}); configuration and weights are not of the "
            "same model, or the family needs a newer mlx-lm"
        ) from error
