"""What a conversion would do, how large it gets, and the doing of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from ondevice.artifact import (
    PAIR_FILE,
    VERIFIER_FILE,
    PairManifest,
    VerifierManifest,
    check_tokenizer,
    replacing,
    sweep,
)
from ondevice.converters.adopted import adopt_verifier, check_family, stored_dtype
from ondevice.converters.checkpoint import Checkpoint, matrix_shapes, open_checkpoint
from ondevice.converters.compression import FORMATS, Compression, Format, stored_bytes
from ondevice.converters.huggingface import SafetensorsStore, read_folder_config
from ondevice.converters.memory import cache_per_token, smallest_mac_gb
from ondevice.converters.network import check_layers
from ondevice.converters.options import DrafterOptions
from ondevice.converters.pair import DRAFTER_FOLDER, VERIFIER_FOLDER
from ondevice.converters.progress import Reporter
from ondevice.converters.tokenizer import tokenizer_digest, tokenizer_from_folder
from ondevice.converters.verifier import Dtype, tensor_bytes, write_verifier
from ondevice.converters.vocabulary import frequent_tokens
from ondevice.errors import ArtifactError, BadRequest
from ondevice.home import home_folder, locked, require_space
from ondevice.models.config import ModelConfig
from ondevice.models.drafter_weights import head_partition

DTYPES: tuple[Dtype, ...] = ("float32", "float16", "bfloat16")
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_SMALL_FILES = 20_000_000  # tokenizer, configuration, manifest and graph

Section = tuple[str, dict[str, str]]


class Plan(Protocol):
    """One conversion, decided but not done."""

    @property
    def disk_bytes(self) -> int:
        """The most that it will take on the disk."""
        ...

    def sections(self) -> list[Section]:
        """What there is to know, for people: a title, and values by name."""
        ...

    def facts(self) -> dict[str, Any]:
        """The same for programs."""
        ...

    def write(self, folder: Path, reporter: Reporter) -> None:
        """Do it: the artifact is at `folder` whole or not at all."""
        ...


@contextmanager
def _writing(folder: Path, disk_bytes: int, reporter: Reporter) -> Iterator[Path]:
    """`replacing`, once there is room and nobody else converts; what a killed run left goes."""
    with locked(home_folder(), lambda: reporter.say("Waiting for another conversion to finish")):
        folder.parent.mkdir(parents=True, exist_ok=True)
        sweep(folder)
        require_space(folder.parent, disk_bytes)
        with replacing(folder) as scratch:
            yield scratch


@dataclass(frozen=True)
class VerifierPlan:
    """A verifier from a folder as it is, or from a GGUF file in 16 or 32 bits.

    checkpoint: of a GGUF file; None for a folder.
    """

    source: Path
    dtype: Dtype | None
    family: str
    stored: str
    disk_bytes: int
    vocab_size: int
    checkpoint: Checkpoint | None
    tokenizer_sha256: str

    @classmethod
    def of(cls, source: Path, dtype: str | None) -> Self:
        """Look at SOURCE; raises what reading it raises, BadRequest for an unknown dtype."""
        if dtype not in (None, *DTYPES):
            raise BadRequest(f"--dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
        if source.is_dir():
            return cls._of_folder(source, dtype)
        checkpoint = open_checkpoint(source)
        config = checkpoint.config
        written: Dtype = dtype or "bfloat16"
        return cls(
            source=source,
            dtype=written,
            family=config.family,
            stored=written,
            disk_bytes=sum(tensor_bytes(config, _DTYPE_BYTES[written]).values()),
            vocab_size=config.vocab_size,
            checkpoint=checkpoint,
            tokenizer_sha256=checkpoint.tokenizer_sha256,
        )

    @classmethod
    def _of_folder(cls, source: Path, dtype: Dtype | None) -> Self:
        raw = read_folder_config(source)
        check_family(raw, source)
        store = SafetensorsStore(source)
        sizes = {**raw, **(raw.get("text_config") or {})}
        held = sum(file.stat().st_size for file in store.files)
        return cls(
            source=source,
            dtype=dtype,
            family=str(raw["model_type"]),
            stored=dtype or stored_dtype(raw, store),
            disk_bytes=held if dtype is None else store.elements * _DTYPE_BYTES[dtype],
            vocab_size=int(sizes.get("vocab_size", 0)),
            checkpoint=None,
            tokenizer_sha256=tokenizer_digest(tokenizer_from_folder(source)),
        )

    def sections(self) -> list[Section]:
        """See Plan."""
        return [
            (
                f"verifier from {self.source}",
                {"family": self.family, "weights": self.stored, "size": _mb(self.disk_bytes)},
            )
        ]

    def facts(self) -> dict[str, Any]:
        """See Plan."""
        return {
            "kind": "verifier",
            "source": str(self.source),
            "family": self.family,
            "weights": self.stored,
            "bytes": self.disk_bytes,
        }

    def write(self, folder: Path, reporter: Reporter) -> None:
        """See Plan."""
        with _writing(folder, self.disk_bytes + _SMALL_FILES, reporter) as scratch:
            self.write_into(scratch, reporter)

    def write_into(self, folder: Path, reporter: Reporter) -> VerifierManifest:
        """Write at `folder`, which does not exist yet."""
        with reporter.stage(f"Writing the verifier ({self.stored})", in_bytes=True) as step:
            if self.checkpoint is None:
                return adopt_verifier(self.source, folder, self.dtype, step)
            assert self.dtype is not None
            return write_verifier(self.checkpoint, folder, self.dtype, step)


@dataclass(frozen=True)
class DrafterPlan:
    """A drafter of some layers of a checkpoint. rows: the tokens it can propose, None for all."""

    checkpoint: Checkpoint
    verifier_folder: Path | None
    layers: tuple[int, ...]
    rows: tuple[int, ...] | None
    options: DrafterOptions

    @classmethod
    def of(
        cls,
        source: Path,
        verifier_folder: Path | None,
        *,
        layers: Sequence[int] | None,
        row_counts: Sequence[int],
        context_sizes: Sequence[int],
        compression: str,
        head_compression: str | None,
        vocabulary: int | None,
        corpus: Path | None,
    ) -> Self:
        """Look at SOURCE and check what is asked for; raises what reading it raises, BadRequest."""
        formats = Compression(
            _format("--compression", compression),
            _format("--head-compression", head_compression or compression),
        )
        options = DrafterOptions(tuple(row_counts), tuple(context_sizes), formats)
        options.check()
        if (vocabulary is None) != (corpus is None):
            raise BadRequest(
                "--drafter-vocab: expected --corpus FILE beside it, a text as the verifier writes "
                "it; give both or neither"
            )
        checkpoint = open_checkpoint(source)
        chosen = tuple(range(checkpoint.config.num_layers) if layers is None else layers)
        check_layers(checkpoint.config, chosen)
        rows = None
        if vocabulary is not None and corpus is not None:
            rows = frequent_tokens(
                checkpoint.tokenizer, corpus, vocabulary, checkpoint.config.vocab_size
            )
        if verifier_folder is not None:
            verifier = VerifierManifest.read(verifier_folder / VERIFIER_FILE)
            digest = checkpoint.tokenizer_sha256
            check_tokenizer(f"the drafter's source {checkpoint.label}", digest, verifier)
        return cls(checkpoint, verifier_folder, chosen, rows, options)

    @property
    def config(self) -> ModelConfig:
        """The drafter's configuration, with all the source's tokens."""
        return self.checkpoint.config.selected(self.layers)

    @property
    def weight_bytes(self) -> int:
        """What weight.bin will hold, to a few vectors."""
        config, formats = self.config, self.options.compression
        layer = sum(
            stored_bytes(*shape, formats.layers) for shape in matrix_shapes(config).values()
        )
        tokens = config.vocab_size if self.rows is None else len(self.rows)
        head = sum(
            stored_bytes(rows, config.hidden_size, formats.head) for rows in head_partition(tokens)
        )
        return layer * config.num_layers + head

    @property
    def disk_bytes(self) -> int:
        """See Plan: the package, and an embedding of its own."""
        return self.weight_bytes + 2 * self.config.vocab_size * self.config.hidden_size

    def sections(self) -> list[Section]:
        """See Plan."""
        config, options = self.config, self.options
        tokens = config.vocab_size if self.rows is None else len(self.rows)
        per_token = cache_per_token(config)
        return [
            (
                f"drafter from {self.checkpoint.label}",
                {
                    "family": config.family,
                    "layers": f"{config.num_layers} of {self.checkpoint.config.num_layers}",
                    "functions": ", ".join(f.name for f in options.functions(config)),
                    "weights": f"{options.compression}, {_mb(self.weight_bytes)}",
                    "vocabulary": f"{tokens} of {config.vocab_size} tokens",
                    "cache": f"{_mb(per_token * max(options.context_sizes))} at "
                    f"{max(options.context_sizes)} slots",
                },
            )
        ]

    def facts(self) -> dict[str, Any]:
        """See Plan."""
        options = self.options
        return {
            "kind": "drafter",
            "source": self.checkpoint.label,
            "family": self.config.family,
            "layers": list(self.layers),
            "functions": [function.name for function in options.functions(self.config)],
            "compression": str(options.compression),
            "tokens": self.config.vocab_size if self.rows is None else len(self.rows),
            "weight_bytes": self.weight_bytes,
            "bytes": self.disk_bytes,
            "cache_bytes": cache_per_token(self.config) * max(options.context_sizes),
        }

    def write(self, folder: Path, reporter: Reporter) -> None:
        """See Plan."""
        with _writing(folder, self.disk_bytes + _SMALL_FILES, reporter) as scratch:
            self.write_into(scratch, self.verifier_folder, reporter)

    def write_into(self, folder: Path, verifier_folder: Path | None, reporter: Reporter) -> None:
        """Write at `folder`, which does not exist yet, for the verifier in `verifier_folder`."""
        title = f"Building the Core ML drafter ({len(self.layers)} layers)"
        with reporter.stage(title) as step:
            # Imported when it is due: coremltools takes seconds.
            from ondevice.converters.drafter import convert_drafter

            convert_drafter(
                self.checkpoint,
                verifier_folder,
                folder,
                layers=self.layers,
                rows=self.rows,
                row_counts=self.options.row_counts,
                context_sizes=self.options.context_sizes,
                compression=self.options.compression,
                progress=step,
            )


@dataclass(frozen=True)
class PairPlan:
    """A verifier and a drafter of another model that shares its tokenizer."""

    verifier: VerifierPlan
    drafter: DrafterPlan

    @classmethod
    def of(cls, verifier: VerifierPlan, drafter: DrafterPlan) -> Self:
        """ArtifactError when a token means another thing to each."""
        ours, theirs = drafter.checkpoint.tokenizer_sha256, verifier.tokenizer_sha256
        if ours != theirs:
            raise ArtifactError(
                f"the tokenizers differ: {drafter.checkpoint.label} has {ours[:12]}, "
                f"{verifier.source} has {theirs[:12]}; take a drafter of the verifier's family"
            )
        return cls(verifier, drafter)

    @property
    def disk_bytes(self) -> int:
        """See Plan."""
        return self.verifier.disk_bytes + self.drafter.disk_bytes

    @property
    def memory_bytes(self) -> int:
        """Weights of both, the drafter's largest cache; the verifier's cache is not known here."""
        cache = cache_per_token(self.drafter.config) * max(self.drafter.options.context_sizes)
        return self.verifier.disk_bytes + self.drafter.weight_bytes + cache

    def sections(self) -> list[Section]:
        """See Plan."""
        smallest = smallest_mac_gb(self.memory_bytes)
        fits = "no Mac" if smallest is None else f"a Mac with {smallest} GB or more"
        memory = {"weights and drafter's cache": _mb(self.memory_bytes), "fits": fits}
        return [*self.verifier.sections(), *self.drafter.sections(), ("memory of both", memory)]

    def facts(self) -> dict[str, Any]:
        """See Plan."""
        return {
            "kind": "pair",
            "verifier": self.verifier.facts(),
            "drafter": self.drafter.facts(),
            "bytes": self.disk_bytes,
            "memory_bytes": self.memory_bytes,
            "smallest_mac_gb": smallest_mac_gb(self.memory_bytes),
        }

    def write(self, folder: Path, reporter: Reporter) -> None:
        """See Plan."""
        with _writing(folder, self.disk_bytes + 2 * _SMALL_FILES, reporter) as scratch:
            scratch.mkdir()
            manifest = self.verifier.write_into(scratch / VERIFIER_FOLDER, reporter)
            self.drafter.write_into(scratch / DRAFTER_FOLDER, scratch / VERIFIER_FOLDER, reporter)
            PairManifest(
                name=folder.name,
                verifier=VERIFIER_FOLDER,
                drafter=DRAFTER_FOLDER,
                tokenizer_sha256=manifest.tokenizer_sha256,
            ).write(scratch / PAIR_FILE)


def _format(option: str, name: str) -> Format:
    if name not in FORMATS:
        raise BadRequest(f"{option}: expected one of {', '.join(FORMATS)}, got {name!r}")
    return name


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB"
