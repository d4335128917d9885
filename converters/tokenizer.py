"""Tokenizers: from a folder, from GGUF metadata without torch, and their identity."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.errors import BadCheckpoint, UnsupportedModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedTokenizerFast

# Without it, importing transformers prints advice about a missing torch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

# Values of tokenizer.ggml.token_type (llama.cpp, llama_token_type).
_CONTROL, _USER_DEFINED = 3, 4

# The split of Llama 3's tokenizer.json: contractions, words, numbers of up to three digits,
# punctuation, line ends, blanks.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Qwen 2's: the same, but each digit is a word of its own.
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def tokenizer_from_folder(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a Hugging Face folder, exactly as its tokenizer.json states it.

    Raises BadCheckpoint when it cannot be read.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        # Not AutoTokenizer: for "LlamaTokenizer" transformers 5 rebuilds the splitting rules.
        loaded: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
            folder, local_files_only=True
        )
    except Exception as error:
        # tokenizers raises bare Exception for a damaged tokenizer.json.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadCheckpoint(
            f"{folder / 'tokenizer.json'}: expected a fast tokenizer, got one that does not load "
            f"({reason}); download it again"
        ) from error
    return loaded


def tokenizer_from_gguf(metadata: Mapping[str, Any], label: str) -> PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer that GGUF metadata describes, with its chat template.

    metadata: as `mx.load(..., return_metadata=True)` gives it, scalars unwrapped. Raises
    UnsupportedModel for other kinds (SentencePiece) or unknown splitting rules, BadCheckpoint for
    missing or inconsistent entries.
    """
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    tokens = _entry(metadata, "tokens", label)
    backend = _byte_level_bpe(metadata, label)
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    for token, kind in zip(tokens, kinds, strict=False):
        if kind == _CONTROL:
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, special=False, normalized=False)])
    roles = {
        role: tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in _ROLE_KEYS.items()
        if 0 <= metadata.get(f"tokenizer.ggml.{key}_token_id", -1) < len(tokens)
    }
    if metadata.get("tokenizer.ggml.add_bos_token") and "bos_token" in roles:
        _begin_with(backend, roles["bos_token"])
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **roles
    )
    tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    return tokenizer


_ROLE_KEYS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into `folder`; OSError."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        # tokenizers raises a bare Exception that has errno only in its text.
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def tokenizer_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """Hex sha256 of what token ids mean: vocabulary, merges, added tokens, splitting rules.

    Chat template, truncation, padding, the begin-of-text rule and offsets are left out: two
    tokenizers that differ only there give every text the same ids, so a drafter fits both.
    """
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    model = {key: value for key, value in spec["model"].items() if value not in (None, False)}
    model["merges"] = [
        merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges", [])
    ]
    identity = {
        "model": model,
        "added": sorted(
            [token["id"], token["content"], token["special"]] for token in spec["added_tokens"]
        ),
        "normalizer": spec["normalizer"],
        "pre_tokenizer": _without_offsets(spec["pre_tokenizer"]),
    }
    canonical = json.dumps(identity, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _without_offsets(rule: Any) -> Any:
    if isinstance(rule, dict):
        return {
            key: _without_offsets(value) for key, value in rule.items() if key != "trim_offsets"
        }
    if isinstance(rule, list):
        return [_without_offsets(part) for part in rule]
    return rule


def _entry(metadata: Mapping[str, Any], key: str, label: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or (key == "tokens" and len(set(value)) != len(value)):
        raise BadCheckpoint(
            f"{label}: expected metadata tokenizer.ggml.{key} as a list"
            f"{' of distinct tokens' if key == 'tokens' else ''}, got none such; "
            "download the file again"
        )
    return value


def _byte_level_bpe(metadata: Mapping[str, Any], label: str) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UnsupportedModel(
            f"{label}: tokenizer model {kind!r} is not supported; supported: 'gpt2' "
            "(byte-level BPE); convert from the Hugging Face folder instead"
        )
    rule = metadata.get("tokenizer.ggml.pre", "default")
    rules = _splitting_rules()
    if rule not in rules:
        raise UnsupportedModel(
            f"{label}: tokenizer splitting rule {rule!r} is not supported; supported: "
            f"{', '.join(sorted(rules))}; convert from the Hugging Face folder instead"
        )
    vocabulary = {token: index for index, token in enumerate(_entry(metadata, "tokens", label))}
    pairs = [merge.partition(" ") for merge in _entry(metadata, "merges", label)]
    merges = [(left, right) for left, _, right in pairs]
    try:
        model = BPE(vocabulary, merges, ignore_merges=rule == "llama-bpe")
    except Exception as error:
        # tokenizers raises bare Exception when a merge names an unknown token.
        raise BadCheckpoint(
            f"{label}: merges do not fit the vocabulary ({error}); download the file again"
        ) from error
    backend = Tokenizer(model)
    if rule == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = rules[rule]
    backend.decoder = decoders.ByteLevel()
    return backend


def _splitting_rules() -> dict[str, PreTokenizer]:
    """llama.cpp's names (tokenizer.ggml.pre) for how text is cut before merging."""
    from tokenizers import Regex, pre_tokenizers

    def split_by(pattern: str) -> PreTokenizer:
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(pattern), behavior="isolated"), bytes_only]
        )

    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return {
        "gpt-2": gpt2,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2]),
        "llama-bpe": split_by(_LLAMA3_SPLIT),
        "qwen2": split_by(_QWEN2_SPLIT),
    }


def _begin_with(backend: Tokenizer, token: str) -> None:
    from tokenizers.processors import TemplateProcessing

    backend.post_processor = TemplateProcessing(
        single=f"{token} $A",
        pair=f"{token} $A {token} $B",
        special_tokens=[(token, backend.token_to_id(token))],
    )
