"""Where all meet: a pair of models opened once, each unit on a thread of its own.

with Engine.open("smollm2") as engine, engine.session() as session:
    for piece in session.stream("What is the capital of France?"):
        print(piece.text, end="", flush=True)
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ondevice import blas
from ondevice.artifact import PAIR_FILE, PairManifest, check_tokenizer
from ondevice.corpus import read_corpus
from ondevice.costs import ASSUMED, CostModel, CostTable
from ondevice.deadline import Deadline
from ondevice.drafters import Drafters
from ondevice.driver import Driver
from ondevice.energy import open_meter
from ondevice.errors import (
    ArtifactError,
    BadCheckpoint,
    BadRequest,
    Closed,
    OnDeviceError,
    UnitLost,
    UserError,
)
from ondevice.lookup import SuffixIndex
from ondevice.models.pairs import default_pair
from ondevice.policy import Experience
from ondevice.power import Power
from ondevice.prompt import Prompt
from ondevice.records import UnitName
from ondevice.session import Answer, Model, Options, Session
from ondevice.units import DrafterUnit, SaysMemory, UnitMemory, VerifierUnit
from ondevice.verifierfolder import check_verifier_folder
from ondevice.weightless import Weightless
from ondevice.worker import UnitWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    from ondevice.coststore import CostRecord
    from ondevice.ladder import Choice


class Engine:
    """A verifier and its drafter, shared by all sessions."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_tokens: frozenset[int],
        open_verifier: Callable[[], VerifierUnit],
        open_drafter: Callable[[], DrafterUnit] | None,
        deadline: Deadline | None = None,
        costs: CostTable | None = None,
    ) -> None:
        """The parts, for those who bring their own units; everyone else calls `open`.

        Both functions run on the unit's own thread. A drafter that does not open costs speed
        only: answers say why. deadline: for the drafter's steps, see `Deadline`. costs: what the
        steps take, None assumes something. Raises what opening the verifier raised, and the user's
        mistakes.
        """
        self._experience = Experience(CostModel(costs or ASSUMED))
        self.cost_record: CostRecord | None = None
        """Where `costs` began; None when they were not measured."""
        self.cost_trouble = ""
        """Why the costs, or a part of them, are assumed although they should be known."""
        self._folder: Path | None = None
        self._chosen: list[Choice] = []
        self._power = Power()
        self._corpus: SuffixIndex | None = None
        self._sessions: set[Session] = set()
        self._closed = False
        self._lock = threading.Lock()
        self._drafters = Drafters(open_drafter, deadline or Deadline()) if open_drafter else None
        self._verifier = UnitWorker(
            "verifier", open_verifier, on_lost=partial(_end_drafters, self._drafters)
        )
        # Also at exit, and when nobody holds the engine any more.
        self._close_workers = weakref.finalize(self, _close, self._verifier, self._drafters)
        try:
            no_drafter = self._missing_drafter()
            unit = self._verifier.opened()
        except BaseException:
            self._close_workers()
            raise
        self.model = Model(
            tokenizer=tokenizer,
            end_tokens=end_tokens,
            context=unit.context,
            vocab_size=unit.vocab_size,
            shape=unit.shape,
            shape_reason=unit.shape_reason,
            no_drafter=no_drafter,
        )

    @classmethod
    def open(cls, pair: str | Path | None = None, *, quiet: bool = False) -> Self:
        """Open a pair by its name in pairs.toml or its folder; None is the default pair.

        A named pair is downloaded and converted when it is not there yet, and measured on this
        machine when that was not done yet; quiet: without progress on stderr. Raises UserError for
        what the user can mend.
        """
        from ondevice.converters.pair import prepare_pair

        folder = prepare_pair(default_pair() if pair is None else pair, quiet=quiet)
        return cls.open_folder(folder, quiet=quiet)

    @classmethod
    def open_folder(cls, folder: str | Path, *, measure: bool = True, quiet: bool = False) -> Self:
        """Open a converted pair; raises ArtifactError when its parts do not match.

        measure: know its costs, see `measure_costs`; without, they are assumed. quiet: without
        progress on stderr.
        """
        blas.prepare()
        # Not first on the verifier's thread: only then does MLX free what it compiles on this one
        # (a later conversion's parity check, say) before the interpreter is gone; else a segfault.
        import mlx.core

        from ondevice.converters.tokenizer import tokenizer_digest

        folder = Path(folder)
        pair = PairManifest.read(folder / PAIR_FILE)
        verifier_folder = folder / pair.verifier
        verifier = check_verifier_folder(verifier_folder)
        tokenizer = _load_tokenizer(verifier_folder)
        check_tokenizer(
            f"the tokenizer in {verifier_folder}", tokenizer_digest(tokenizer), verifier
        )
        check_tokenizer(f"the pair in {folder}", pair.tokenizer_sha256, verifier)

        def open_verifier() -> VerifierUnit:
            from ondevice.verifier import MLXVerifier

            return MLXVerifier.open(verifier_folder)

        chosen: list[Choice] = []

        def open_drafter() -> DrafterUnit:
            from ondevice.ladder import choose, open_process

            drafter_folder = folder / (pair.drafter or "")
            if not chosen:
                with _examining(quiet) as say:
                    chosen.append(choose(drafter_folder, verifier_folder, say=say))
            return open_process(drafter_folder, verifier_folder, chosen[0])

        engine = cls(
            tokenizer,
            _end_tokens(verifier_folder, tokenizer),
            open_verifier,
            open_drafter if pair.drafter else None,
        )
        engine._folder, engine._chosen = folder, chosen
        on_gpu = mlx.core.default_device().type == mlx.core.gpu
        on_ane = bool(chosen) and chosen[0].kind in ("pyobjc", "coremltools")
        engine._power = Power(open_meter(), "gpu" if on_gpu else "cpu", "ane" if on_ane else None)
        if measure:
            engine.measure_costs(quiet=quiet)
        return engine

    def measure_costs(self, *, again: bool = False, quiet: bool = False) -> None:
        """Know what this pair's steps take on this machine: `costs`, before the first session.

        They are read from the table that is kept for pair, machine and versions; where there is
        none, or `again`, both units are measured, which takes up to 30 s. What cannot be measured
        stays assumed, see `cost_trouble`. quiet: without progress on stderr. An engine made of
        parts keeps the costs it has. Closes the engine when it raises: Closed, UnitLost.
        """
        if self._folder is None:
            return
        self._power.meter.know_idle()
        from ondevice.coststore import costs_of

        drafter = self._drafters.current() if self._drafters is not None else None
        try:
            record = costs_of(self._folder, self._verifier, drafter, again=again, quiet=quiet)
        except Exception as error:
            if self._verifier.usable:
                self.cost_trouble = f"the verifier could not be measured: {error}"
                return
            self.close()
            raise
        except BaseException:
            self.close()
            raise
        self._experience, self.cost_record = Experience(CostModel(record.table)), record
        self.cost_trouble = record.trouble

    def look_into(self, file: str | Path) -> int:
        """Let sessions from now on propose what follows in the text of `file`; its tokens.

        For code bases, templates and the like. Raises BadRequest for what cannot be read, is no
        text, is empty or is too large, see `ondevice.corpus`.
        """
        self._corpus = read_corpus(Path(file), self.model.tokenizer)
        return self._corpus.length

    @property
    def drafter_runtime(self) -> str | None:
        """What runs the drafter ("emulator-fp32"), for people to read; None without a drafter."""
        if self._drafters is None or self.model.no_drafter:
            return None
        return self._drafters.first.opened().runtime_name

    @property
    def drafter_place(self) -> str | None:
        """Where the drafter runs and why there, a line for people; None without a drafter."""
        runtime = self.drafter_runtime
        return self._chosen[0].line if runtime and self._chosen else runtime

    def memory(self) -> dict[UnitName, UnitMemory]:
        """What the units hold, and the most since the last call; without those that do not say."""
        drafter = self._drafters.current() if self._drafters is not None else None
        units: dict[UnitName, UnitWorker[Any] | None] = {
            "verifier": self._verifier,
            "drafter": drafter,
        }
        held: dict[UnitName, UnitMemory] = {}
        for name, worker in units.items():
            with suppress(OnDeviceError):  # lost in this moment
                if worker is not None and isinstance(worker.opened(), SaysMemory):
                    held[name] = worker.call(_memory)
        return held

    def session(self, *, system: str | None = None) -> Session:
        """A new conversation with caches of its own; `system` is its first message.

        Raises Closed, also once the verifier was lost, which closes the engine, and BadRequest for
        a system message that is no text.
        """
        if system is not None and not isinstance(system, str):
            raise BadRequest(f"a system message must be text, got {type(system).__name__}")
        with self._lock:
            if self._closed:
                raise Closed("this engine is closed; open another one")
            if self._verifier.lost is not None:
                raise Closed(f"this engine is closed; open another one: {self._verifier.lost}")
            weightless = Weightless(self.model.end_tokens, self._corpus)
            driver = Driver(self._verifier, self._drafters, self._experience.copy(), weightless)
            session = Session(self.model, driver, system, self._forget, self._remember, self._power)
            self._sessions.add(session)
        return session

    def generate(self, prompt: Prompt, options: Options | None = None) -> Answer:
        """One answer in a session of its own. Raises as `Session.generate` does."""
        with self.session() as session:
            return session.generate(prompt, options)

    def close(self) -> None:
        """Cancel every answer and free both units; again is harmless."""
        with self._lock:
            self._closed = True
            sessions = list(self._sessions)
        for session in sessions:
            session.close()
        self._close_workers()

    def _missing_drafter(self) -> str:
        """Wait for the drafter; why there is none, "" if there is. Raises the user's mistakes."""
        if self._drafters is None:
            return "the pair has no drafter"
        try:
            self._drafters.first.opened()
        except UserError:
            raise
        except Exception as error:
            self._drafters = None
            return f"the drafter did not open: {error}"
        return ""

    @property
    def costs(self) -> CostModel:
        """What the steps take, as far as is known from answers that have ended."""
        return self._experience.costs

    def _remember(self, session: Session) -> None:
        """Let later sessions begin with what this one knows by now."""
        self._experience = session.experience.copy()

    def _forget(self, session: Session) -> None:
        self._sessions.discard(session)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _memory(unit: SaysMemory) -> UnitMemory:
    return unit.memory()


def _close(verifier: UnitWorker[VerifierUnit], drafters: Drafters | None) -> None:
    verifier.stop()  # both are told before one is waited for
    if drafters is not None:
        drafters.close()
    verifier.close()


@contextmanager
def _examining(quiet: bool) -> Iterator[Callable[[str], None]]:
    """What a drafter's examination is doing goes to stderr, once there is one."""
    from ondevice.converters.progress import Reporter

    reporter, last = Reporter(quiet), ""

    def say(line: str) -> None:
        nonlocal last
        if not last:
            reporter.say("Examining the drafter on this Mac, once; this may take some minutes")
        kind, _, stage = line.partition(": ")
        verb = f"{kind} {stage.partition(' ')[0]}"  # not every function that is run
        if verb != last:
            reporter.say(f"  {line}")
        last = verb

    yield say


def _end_drafters(drafters: Drafters | None, _: UnitLost) -> None:
    """Without its verifier an engine can answer nothing: nothing of it goes on."""
    if drafters is not None:
        drafters.stop()


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    from ondevice.converters.tokenizer import tokenizer_from_folder

    try:
        return tokenizer_from_folder(folder)
    except BadCheckpoint as error:
        raise ArtifactError(f"{error}, or convert the pair again") from error


def _end_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids that end an answer: the tokenizer's, and those of generation_config.json."""
    stated: object = None
    path = folder / "generation_config.json"
    if path.exists():
        try:
            stated = json.loads(path.read_text(encoding="utf-8"))["eos_token_id"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ArtifactError(
                f"{path}: expected a JSON object with eos_token_id, got {type(error).__name__}; "
                "convert the pair again"
            ) from error
    ends = [tokenizer.eos_token_id, *(stated if isinstance(stated, list) else [stated])]
    return frozenset(end for end in ends if isinstance(end, int))
