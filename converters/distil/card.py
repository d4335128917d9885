"""The card of a trained drafter: what it is, how it was made, how much it foretells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from ondevice.artifact import SourceFile, replacing
from ondevice.converters.distil.acceptance import CHAINS
from ondevice.converters.distil.recipe import Recipe
from ondevice.converters.distil.shards import Text

CARD_FILE, README_FILE = "card.json", "README.md"

Tables = dict[str, dict[str, dict[str, float]]]


class DataAmount(BaseModel):
    """What was learned from."""

    model_config = ConfigDict(extra="forbid")

    texts: int
    learned_tokens: int
    tokens_by_domain: dict[str, int]
    tokens_by_temperature: dict[str, int]
    seconds: float
    tok_s: float | None


class TrainingAmount(BaseModel):
    """How long it was learned; tokens are input tokens, each pass counted."""

    model_config = ConfigDict(extra="forbid")

    steps: int
    tokens: int
    seconds: float
    tok_s: float | None
    framework: str
    validations: list[dict[str, float]]


class Card(BaseModel):
    """acceptance: set -> category -> with or without loops -> figure; before: the same figures of
    the drafter that the training began with."""

    model_config = ConfigDict(extra="forbid")

    format: str = "ondevice-distil-card-1"
    verifier: str
    verifier_sources: list[SourceFile]
    tokenizer_sha256: str
    licence: str
    recipe: Recipe
    layers: tuple[int, ...]
    rows: int
    parameters: int
    file: str
    file_bytes: int
    file_sha256: str
    storage: str = "int8 per output channel, norms float32"
    data: DataAmount
    training: TrainingAmount
    started_from: str | None = None
    acceptance: dict[str, Tables]
    before: dict[str, Tables] = {}
    heldout_sha256: str | None = None
    peak_memory_bytes: int | None = None
    converter_version: str

    def write(self, folder: Path) -> None:
        """card.json and README.md in `folder`."""
        with replacing(folder / CARD_FILE) as scratch:
            scratch.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        with replacing(folder / README_FILE) as scratch:
            scratch.write_text(self.readme(), encoding="utf-8")

    def readme(self) -> str:
        """The card for people, in Markdown."""
        data, training = self.data, self.training
        lines = [
            f"# A drafter for {self.verifier}",
            "",
            f"`{self.file}`: {self.file_bytes / 1e6:.1f} MB, {self.storage}; "
            f"{self.parameters / 1e6:.1f}M parameters of its own, begun as the verifier's layers "
            f"{', '.join(map(str, self.layers))}; {self.rows} output rows. "
            f"Licence: {self.licence}.",
            "",
            f"Taught on {data.learned_tokens:,} tokens of {data.texts:,} texts, made in "
            f"{data.seconds / 60:.0f} minutes{_pace(data.tok_s)}: "
            f"{_amounts(data.tokens_by_domain)}. Trained for {training.tokens:,} input tokens in "
            f"{training.steps:,} steps, {training.seconds / 60:.0f} minutes"
            f"{_pace(training.tok_s)}, with {training.framework}.",
        ]
        if self.started_from:
            lines += ["", f"Training began with the drafter {self.started_from}."]
        for name, tables in self.acceptance.items():
            lines += ["", f"## {name}", "", *_table(tables, self.before.get(name))]
        lines += ["", "Figures are measured with the weights as stored.", ""]
        return "\n".join(lines)


def data_amount(texts: Sequence[Text], seconds: float) -> DataAmount:
    """Counts of `texts`, which took `seconds` to make."""
    domains: Counter[str] = Counter()
    temperatures: Counter[str] = Counter()
    for text in texts:
        learned = len(text.tokens) - text.start
        domains[text.domain] += learned
        temperatures[f"{text.temperature:.1f}"] += learned
    total = sum(domains.values())
    return DataAmount(
        texts=len(texts),
        learned_tokens=total,
        tokens_by_domain=dict(sorted(domains.items())),
        tokens_by_temperature=dict(sorted(temperatures.items())),
        seconds=seconds,
        tok_s=total / seconds if seconds else None,
    )


def _pace(tok_s: float | None) -> str:
    return f" ({tok_s:.0f} a second)" if tok_s else ""


def _amounts(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in parts.items())


def _table(tables: Tables, before: Tables | None) -> list[str]:
    chains = [f"accepted, chain of {chain}" for chain in CHAINS]
    head = ["", "tokens", "first choice", "first four", *chains, "sum of min(p, q)"]
    rows = [_row(head), _row(["---"] * len(head))]
    for category, kinds in tables.items():
        rows.append(_figures(category, kinds["with_loops"]))
        rows.append(_figures(f"{category}, without loops", kinds["without_loops"]))
        if before and category in before:
            rows.append(_figures(f"{category}, before training", before[category]["with_loops"]))
    return rows


def _figures(name: str, found: dict[str, float]) -> str:
    shares = [f"{found[key]:.1%}" for key in ("first_choice", "first_four")]
    means = [f"{found[f'accepted_chain_{chain}']:.2f}" for chain in CHAINS]
    return _row([name, f"{found['tokens']:.0f}", *shares, *means, f"{found['overlap']:.2f}"])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
