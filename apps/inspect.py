"""`ondevice inspect`: what an artifact is, for people or as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ondevice.apps.artifacts import Facts, facts, locate
from ondevice.apps.findings import verdict_line
from ondevice.apps.opening import explained, remedy
from ondevice.apps.terminal import results
from ondevice.probereport import ProbeReport

Row = tuple[str, str]


def run(artifact: str, as_json: bool) -> None:
    """Print what `artifact` is. Raises ArtifactError when it is nothing known, or damaged."""
    folder = locate(artifact)
    with explained(folder):
        found = facts(folder)
    if as_json:
        print(json.dumps(found), flush=True)
    else:
        _SECTIONS[found["kind"]](results(), found)


def _print_pair(console: Console, pair: Facts) -> None:
    manifest = pair["manifest"]
    print_rows(
        console,
        f"pair {pair['path']}",
        [("name", manifest["name"]), ("tokenizer", short(manifest["tokenizer_sha256"]))],
    )
    _print_verifier(console, pair["verifier"])
    if pair["drafter"] is None:
        console.print("no drafter: text is decoded plainly")
    else:
        _print_drafter(console, pair["drafter"])
    parts = (part for part in (pair["verifier"], pair["drafter"]) if part is not None)
    advice = remedy(Path(pair["path"]))
    if advice and not all(part["matches_manifest"] for part in parts):
        console.print(f"damaged: {advice}", soft_wrap=True)


def _print_verifier(console: Console, verifier: Facts) -> None:
    manifest = verifier["manifest"]
    rows = [
        ("family", manifest["family"]),
        ("weights", f"{manifest['dtype']}, {megabytes(verifier['bytes'])}"),
        ("context", f"{manifest['context']} tokens"),
        ("vocabulary", f"{manifest['vocab_size']} tokens"),
        *((name, short(sha256)) for name, sha256 in manifest["files_sha256"].items()),
        *_origin(verifier),
    ]
    print_rows(console, f"verifier {verifier['path']}", rows)


def _print_drafter(console: Console, drafter: Facts) -> None:
    manifest = drafter["manifest"]
    rows = [
        ("family", manifest["family"]),
        ("layers", f"{_listed(manifest['layers'])} of its source"),
        ("hidden size", str(manifest["hidden_size"])),
        (
            "heads",
            f"{manifest['num_heads']} query, {manifest['num_kv_heads']} key/value, "
            f"of {manifest['head_dim']}",
        ),
        ("vocabulary", _vocabulary(manifest)),
        ("rows a step", _listed(manifest["row_counts"])),
        ("context", f"{_listed(manifest['context_sizes'])} slots"),
        ("embedding", f"{manifest['embedding_tensor']} of the {manifest['embedding_in']}"),
        ("compression", manifest["compression"]),
        *_parity(manifest["parity"]),
        *_memory(manifest["memory"]),
        *_origin(drafter),
    ]
    print_rows(console, f"drafter {drafter['path']}", rows)
    if manifest["parity"] is not None:
        _print_parity(console, manifest["parity"]["functions"])
    _print_examinations(console, drafter["examinations"])
    _print_package(console, drafter["package"])


def _print_examinations(console: Console, examinations: Iterable[Facts]) -> None:
    """What came of examining the drafter on each Mac that it has been opened on."""
    reports = [ProbeReport.model_validate(each) for each in examinations]
    for machine, found in groupby(reports, lambda each: (each.cpu, each.system)):
        where = ", ".join(part for part in machine if part) or "a Mac"
        print_rows(
            console,
            f"examined on {where}",
            [(each.runtime, verdict_line(each)) for each in found],
        )


def _vocabulary(manifest: Mapping[str, Any]) -> str:
    logits = f"logits in {len(manifest['logit_rows'])} part(s)"
    if manifest["row_to_token"] is None:
        return f"{manifest['vocab_size']} tokens, {logits}"
    return f"{len(manifest['row_to_token'])} of {manifest['vocab_size']} tokens, {logits}"


def _parity(parity: Mapping[str, Any] | None) -> list[Row]:
    if parity is None:
        return [("parity", "not measured")]
    return [
        (
            "parity",
            f"against mlx-lm over {parity['positions']} positions: logits within "
            f"{parity['max_error_rounded']:.1e} of the weights as stored, "
            f"{parity['max_error_unrounded']:.1e} of the unrounded ones; same first choice in fp16 "
            f"{parity['first_choice_agreement_fp16']:.1%}"
            + _agreement(parity["first_choice_agreement"]),
        )
    ]


def _agreement(share: float | None) -> str:
    return "" if share is None else f", as the unrounded weights {share:.1%}"


def _memory(memory: Mapping[str, Any] | None) -> list[Row]:
    if memory is None:
        return []
    weights, cache, token = (memory[key] for key in _MEMORY)
    held = f"weights {megabytes(weights)}, cache {megabytes(cache)} ({token / 1e3:.1f} kB a token)"
    return [("memory", held)]


_MEMORY = ("weights", "cache", "cache_per_token")


def _print_parity(console: Console, functions: Mapping[str, Mapping[str, Any]]) -> None:
    if not functions:
        return
    table = Table(box=None, pad_edge=False, title="parity by function", title_justify="left")
    table.add_column("function", no_wrap=True)
    for name in ("positions", "fp32 error", "fp16 first choice", "in its first 8", "KL (nats)"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, found in functions.items():
        table.add_row(
            name,
            str(found["positions"]),
            f"{found['max_error']:.1e}",
            f"{found['first_choice']:.1%}",
            f"{found['top_8']:.1%}",
            f"{found['divergence']:.1e}",
        )
    console.print(table)


def _origin(part: Facts) -> list[Row]:
    manifest = part["manifest"]
    return [
        ("tokenizer", short(manifest["tokenizer_sha256"])),
        *((f"from {source['name']}", short(source["sha256"])) for source in manifest["sources"]),
        ("converter", f"ondevice {manifest['converter_version']}"),
        ("hashes", "match" if part["matches_manifest"] else "DO NOT MATCH: convert it again"),
    ]


def _print_package(console: Console, package: Facts) -> None:
    rows = [
        ("specification", f"version {package['specification_version']}"),
        (
            "size",
            f"{megabytes(package['bytes'])}, weights {megabytes(package['weights_bytes'])}",
        ),
        ("weights", short(package["weights_sha256"])),
        ("ops", short(package["ops_sha256"])),
        *((f"function {name}", _signature(each)) for name, each in package["functions"].items()),
    ]
    print_rows(console, f"package {package['path']}", rows)
    _print_ops(console, package["functions"])
    _print_lint(console, package["lint"])


def _signature(function: Facts) -> str:
    return f"{_values(function['inputs'])} -> {_values(function['outputs'])}"


def _values(types: Mapping[str, str]) -> str:
    """Names and types; numbered values of one type (k_0, k_1, ...) are named once."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for name, type_ in types.items():
        stem, _, number = name.rpartition("_")
        grouped.setdefault((stem if number.isdigit() else name, type_), []).append(name)
    return ", ".join(
        f"{names[0] if len(names) == 1 else f'{stem}_0..{len(names) - 1}'} {type_}"
        for (stem, type_), names in grouped.items()
    )


def _print_ops(console: Console, functions: Mapping[str, Facts]) -> None:
    table = Table(box=None, pad_edge=False, title="ops", title_justify="left")
    table.add_column("op", no_wrap=True)
    for name in functions:
        table.add_column(name, justify="right", no_wrap=True)
    counts = [each["ops"] for each in functions.values()]
    for op in sorted({op for ops in counts for op in ops}):
        table.add_row(op, *(str(ops.get(op, 0)) for ops in counts))
    table.add_row("total", *(str(sum(ops.values())) for ops in counts))
    console.print(table)


def _print_lint(console: Console, findings: Iterable[Facts]) -> None:
    """One line for each thing found, with the number of places."""
    seen = Counter((each["rule"], each["message"], each["source"]) for each in findings)
    if not seen:
        console.print("lint: nothing that the Neural Engine is known not to like")
    for (rule, message, source), places in seen.items():
        console.print(f"lint: {rule}: {message}, {places} place(s) ({source})", soft_wrap=True)


def print_rows(console: Console, title: str, rows: Iterable[Row]) -> None:
    """Names and values under a title, the values in a column of their own."""
    console.print(title, style=None if console.no_color else "bold")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(f"  {name}", value)
    console.print(table)


def short(sha256: str) -> str:
    """Enough of a hash to tell files apart."""
    return f"sha256 {sha256[:12]}"


def megabytes(size_bytes: int) -> str:
    """A size for people, in MB of 10^6 bytes."""
    return f"{size_bytes / 1e6:.1f} MB"


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


_SECTIONS = {
    "pair": _print_pair,
    "verifier": _print_verifier,
    "drafter": _print_drafter,
    "package": _print_package,
}
