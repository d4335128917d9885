"""Conversations on disk: one .safetensors file a few minutes of work, whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from ondevice.converters.distil.conversation import Conversation
from ondevice.converters.tensorfile import write_tensors
from ondevice.errors import BadRequest

_PATTERN = "data-{:06d}.safetensors"


@dataclass(frozen=True, slots=True)
class Text:
    """One text to learn from.

    tokens (n,), unsigned; targets are the verifier's distributions in the places of tokens[start:]:
    top_tokens and top_logprobs, (n - start, TOP). answer: where the answer begins. looped: it was
    cut at a loop.
    """

    index: int
    domain: str
    temperature: float
    tokens: npt.NDArray[np.unsignedinteger]
    start: int
    top_tokens: npt.NDArray[np.unsignedinteger]
    top_logprobs: npt.NDArray[np.float16]
    answer: int
    looped: bool = False

    def answer_only(self) -> Text:
        """The same tokens, with targets for the answer alone."""
        asked = self.answer - self.start
        return replace(
            self,
            start=self.answer,
            top_tokens=self.top_tokens[asked:],
            top_logprobs=self.top_logprobs[asked:],
        )


class ShardFolder:
    """The shards of one folder, in the order in which they were written.

    `identity` says what the texts depend on; BadRequest when the folder holds texts of another.
    """

    def __init__(self, folder: Path, identity: dict[str, object]) -> None:
        self._folder = folder
        self._identity = json.dumps(identity, sort_keys=True)
        folder.mkdir(parents=True, exist_ok=True)
        for path in self.paths()[:1]:
            if _metadata(path).get("identity") != self._identity:
                raise BadRequest(
                    f"{folder} holds texts of another verifier or recipe; give another folder, or "
                    "take this one away"
                )

    def sweep(self) -> None:
        """Take away what a killed run left half-written; for the one process that writes here."""
        for stale in self._folder.glob(".data-*"):
            shutil.rmtree(stale, ignore_errors=True)

    def paths(self) -> list[Path]:
        """The finished shards."""
        return sorted(self._folder.glob("data-*.safetensors"))

    def finished(self) -> set[int]:
        """Indices of every conversation that was kept or dropped."""
        found: set[int] = set()
        for path in self.paths():
            with safe_open(path, framework="numpy") as file:
                found.update(file.get_tensor("index").tolist())
                found.update(file.get_tensor("dropped").tolist())
        return found

    def write(
        self,
        kept: Sequence[Conversation],
        dropped: Sequence[int],
        vocab_size: int,
        seconds: float,
    ) -> Path:
        """Write the next shard; CacheUnwritable when the disk is full, then nothing is left of it.

        seconds: that it took to make.
        """
        path = self._folder / _PATTERN.format(len(self.paths()))
        notes = {"identity": self._identity, "seconds": f"{seconds:.3f}"}
        write_tensors(path, _columns(kept, dropped, vocab_size), notes)
        return path

    def seconds(self) -> float:
        """How long all shards took to make."""
        return sum(float(_metadata(path).get("seconds", 0)) for path in self.paths())

    def texts(self) -> Iterator[Text]:
        """Every text, shard by shard."""
        for path in self.paths():
            yield from read_shard(path)


def _columns(
    kept: Sequence[Conversation], dropped: Sequence[int], vocab_size: int
) -> dict[str, npt.NDArray[np.generic]]:
    small = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    lengths = [len(one.tokens) for one in kept]
    domains = "\n".join(one.domain for one in kept).encode()
    return {
        "index": np.array([one.index for one in kept], np.int64),
        "dropped": np.array(dropped, np.int64),
        "length": np.array(lengths, np.int32),
        "start": np.array([one.learned_start for one in kept], np.int32),
        "answer": np.array([one.answer_start for one in kept], np.int32),
        "looped": np.array([one.looped for one in kept], np.bool_),
        "temperature": np.array([one.answer_temperature for one in kept], np.float32),
        "domain": np.frombuffer(domains, np.uint8).copy(),
        "tokens": np.concatenate([np.array(one.tokens, small) for one in kept]),
        "top_tokens": np.concatenate([np.array(one.top_tokens, small) for one in kept]),
        "top_logprobs": np.concatenate([np.array(one.top_logprobs, np.float16) for one in kept]),
    }


def read_shard(path: Path) -> Iterator[Text]:
    """The texts of one shard."""
    with safe_open(path, framework="numpy") as file:
        columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    domains = columns["domain"].tobytes().decode().split("\n")
    first = first_target = 0
    for row, (length, start) in enumerate(zip(columns["length"], columns["start"], strict=True)):
        targets = int(length - start)
        yield Text(
            index=int(columns["index"][row]),
            domain=domains[row],
            temperature=float(columns["temperature"][row]),
            tokens=columns["tokens"][first : first + length],
            start=int(start),
            top_tokens=columns["top_tokens"][first_target : first_target + targets],
            top_logprobs=columns["top_logprobs"][first_target : first_target + targets],
            answer=int(columns["answer"][row]),
            looped=bool(columns["looped"][row]),
        )
        first += int(length)
        first_target += targets


def _metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="numpy") as file:
        return dict(file.metadata() or {})
