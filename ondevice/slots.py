"""The drafter's cache: slots that the host owns, and who sits in them.

A *slot* is one place of every layer's key and value buffers. Text and tree nodes take any free
slot, in any order; what a row sees is said by the masks of its step alone. So branching, rollback
and commit are bookkeeping, and nothing is ever moved.

A slot is a cache entry: whatever has none is computed again when a row needs it. Two rules keep
that sound. Committed tokens without a slot are always the newest ones, so that each row finds its
whole text before it. Rows that are not finite are never written: a NaN in a masked slot would reach
every row (0 x NaN), so the contents of free slots stay finite too.

The pool is called by one thread, between steps. A slot that is freed may be taken again at once,
because no step is in flight then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ondevice.errors import UnitFailed
from ondevice.models.ane import MASKED
from ondevice.records import NodeToken

Array = npt.NDArray[Any]
Allocate = Callable[[tuple[int, ...], np.dtype[Any]], Array]
"""Makes zeros of a shape and dtype, in memory that whoever runs the drafter likes best."""

SINKS = 4
"""The oldest tokens are kept when the text outgrows the pool (Xiao et al. 2023, section 3)."""
TREE_ROOM = 64
"""Slots that the text leaves to the tree: one step of the widest function."""
_NONE = -1


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one slot holds: keys and values, each (layers, kv_heads, head_dim)."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class StepRow:
    """A row of a forward: the token at an absolute `position`.

    node: None for committed text. ancestors: the nodes above it, top down, itself excluded.
    """

    token: int
    position: int
    node: int | None = None
    ancestors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Seat:
    slot: int
    position: int
    token: int


class SlotPool:
    """One session's slots: `context` of them, one of the ascending sizes in `contexts`.

    The pool starts at the smallest size and moves to a larger one when text and tree no longer fit:
    the used slots are copied, once. It moves back only when the text is cut to half of a smaller
    size. At the largest size the text slides: its oldest slots after the first SINKS are freed.
    `window` is the first position seen beyond those, 0 while all are seen.
    """

    def __init__(
        self, shape: CacheShape, contexts: Sequence[int], allocate: Allocate = np.zeros
    ) -> None:
        """allocate: makes each layer's buffers."""
        self._shape, self._zeros = shape, allocate
        self._contexts = sorted(contexts)
        self._tokens: list[int] = []
        self._slots: list[int] = []  # of each committed position
        self._computed = 0  # visible positions before this one have a slot, later ones have none
        self._window = SINKS
        self._nodes: dict[int, _Seat] = {}
        self._allocate(self._contexts[0])

    @property
    def context(self) -> int:
        """S, the number of slots."""
        return self._context

    @property
    def tokens(self) -> Sequence[int]:
        """All committed tokens; not to be written to."""
        return self._tokens

    @property
    def window(self) -> int:
        """The first position seen beyond the oldest SINKS; 0 while every position is seen."""
        return 0 if self._window == SINKS else self._window

    @property
    def free(self) -> int:
        """How many slots are free."""
        return len(self._free)

    @property
    def room(self) -> int:
        """The most rows that a step may have: text that slides leaves that many slots but SINKS."""
        return tree_room(self._context)

    @property
    def buffers(self) -> Mapping[str, Array]:
        """Inputs `k_i`, `v_i` of layer i, each (1, kv_heads, S, head_dim); the slots themselves."""
        return self._buffers

    def occupied(self) -> list[int]:
        """Every used slot, once for each of its holders."""
        text = [slot for slot in self._slots if slot != _NONE]
        return text + [seat.slot for seat in self._nodes.values()]

    def holds(self, node: int) -> bool:
        """Whether `node` has a slot."""
        return node in self._nodes

    def missing(self) -> Iterator[StepRow]:
        """Committed tokens that a row must see and that have no slot, oldest first."""
        for position in range(self._computed, len(self._tokens)):
            if position < SINKS or position >= self._window:
                yield StepRow(self._tokens[position], position)

    # Text and tree

    def extend(self, tokens: Iterable[int]) -> None:
        """Append committed `tokens` without slots; every node is dropped."""
        self.drop(list(self._nodes))
        self._tokens += tokens
        self._slots += [_NONE] * (len(self._tokens) - len(self._slots))
        self._fit_text()

    def commit(self, committed: Sequence[NodeToken]) -> None:
        """Append `committed`; nodes among them keep their slots.

        Raises UnitFailed, with nothing changed, when a node's token or place is not the one that
        its slot was computed for.
        """
        for position, entry in enumerate(committed, start=len(self._tokens)):
            seat = self._nodes.get(entry.node)
            if seat is not None and (seat.position, seat.token) != (position, entry.token):
                raise UnitFailed(
                    f"node {entry.node} is token {seat.token} at {seat.position} for the drafter, "
                    f"but was committed as {entry.token} at {position}; its session must be reset"
                )
        for entry in committed:
            seat = self._nodes.pop(entry.node, None)
            self._tokens.append(entry.token)
            self._slots.append(_NONE)
            if seat is None:
                continue
            if self._computed == len(self._tokens) - 1:
                self._seat_text(len(self._tokens) - 1, seat.slot)
            else:  # a gap before it: text without slots must stay the newest
                self._free.append(seat.slot)
        self._fit_text()

    def drop(self, nodes: Iterable[int]) -> None:
        """Free the slots of `nodes`; those that have none are ignored."""
        for node in nodes:
            seat = self._nodes.pop(node, None)
            if seat is not None:
                self._free.append(seat.slot)

    def truncate(self, length: int) -> None:
        """Drop every node and all text from `length` on.

        When less than half of the text that fits is still seen, the text after the first SINKS
        loses its slots and comes back with what slid away before.
        """
        self.drop(list(self._nodes))
        self._free_text(length, len(self._tokens))
        del self._tokens[length:], self._slots[length:]
        self._computed = min(self._computed, length)
        smaller = next((size for size in self._contexts if length <= size // 2), self._context)
        if smaller < self._context:
            self._move(smaller)
        limit = self._context - self.room
        if self._window > SINKS and 2 * (length - self._window) < min(length, limit):
            self._free_text(SINKS, length)
            self._window = SINKS
            self._computed = min(self._computed, SINKS)
        self._fit_text()

    # A step

    def make_room(self, rows: int, keep: Iterable[int]) -> None:
        """See that `rows` slots are free, and that the nodes of `keep` still hold theirs.

        In this order: a larger context; the oldest text, down to half of the slots; other nodes,
        oldest first. Raises UnitFailed when that is not enough.
        """
        while self.free < rows and self._context < self._contexts[-1]:
            self._move(self._contexts[self._contexts.index(self._context) + 1])
        lacking = rows - self.free
        if lacking <= 0:
            return
        seen = self._computed - self._window
        spare = min(lacking, seen, SINKS + seen - self._context // 2)
        if spare > 0:
            self._slide(self._window + spare)
        kept = set(keep)
        others = sorted(node for node in self._nodes if node not in kept)
        self.drop(others[: max(0, rows - self.free)])
        if self.free < rows:
            raise UnitFailed(
                f"the drafter's tree holds {len(self._nodes)} nodes and needs {rows} more slots, "
                f"but only {self.free} of {self._context} are free; expand fewer nodes"
            )

    def fill_masks(self, rows: Sequence[StepRow], mask: Array, mask_new: Array) -> None:
        """Write the masks of a step, (1, 1, T, S) and (1, 1, T, T), T >= len(rows).

        Text comes before nodes, ancestors before descendants. A row sees itself, the text before it
        and its ancestors, each in its slot if it has one, else in this step; surplus rows see only
        themselves.
        """
        over_slots, over_rows = mask[0, 0], mask_new[0, 0]
        over_slots[: len(rows)] = self._text_mask
        over_slots[len(rows) :] = MASKED
        over_rows[:] = MASKED
        np.fill_diagonal(over_rows, 0)
        text = sum(row.node is None and not self._seated(row) for row in rows)
        over_rows[:text, :text] = np.triu(np.full((text, text), MASKED), 1)
        columns: dict[int, int] = {}
        for index, row in enumerate(rows):
            if row.node is None:
                if self._seated(row):
                    over_slots[index, self._slots[row.position]] = MASKED
                continue
            over_rows[index, :text] = 0
            for node in row.ancestors:
                seat = self._nodes.get(node)
                if seat is not None:
                    over_slots[index, seat.slot] = 0
                else:
                    over_rows[index, columns[node]] = 0
            columns[row.node] = index

    def narrow_masks(
        self, rows: Sequence[StepRow], window: int, mask: Array, mask_new: Array
    ) -> None:
        """Hide from each row what lies `window` positions or more before it.

        mask, mask_new: as `fill_masks` wrote them for the same rows.
        """
        at = np.array([row.position for row in rows])[:, None]
        count = len(rows)
        mask[0, 0, :count][self._positions[None] <= at - window] = MASKED
        mask_new[0, 0, :count, :count][at - window >= at.T] = MASKED

    def write(self, rows: Sequence[StepRow], keys: Array, values: Array) -> None:
        """Give `rows` their slots and store column i of `keys`, `values` for row i.

        keys, values: (layers, kv_heads, T, head_dim). A row that has its slot already keeps it and
        is not stored again. Raises UnitFailed, with nothing changed, when a row is not finite.
        """
        check_finite("keys", keys[:, :, : len(rows)])
        check_finite("values", values[:, :, : len(rows)])
        new = [index for index, row in enumerate(rows) if not self._seated(row)]
        slots = [self._free.pop() for _ in new]
        for layer in range(self._shape.layers):
            self._keys[layer][0, :, slots] = keys[layer][:, new].swapaxes(0, 1)
            self._values[layer][0, :, slots] = values[layer][:, new].swapaxes(0, 1)
        for index, slot in zip(new, slots, strict=True):
            row = rows[index]
            if row.node is None:
                self._seat_text(row.position, slot)
            else:
                self._nodes[row.node] = _Seat(slot, row.position, row.token)
                self._positions[slot] = row.position

    # Inside

    def _seated(self, row: StepRow) -> bool:
        if row.node is None:
            return self._slots[row.position] != _NONE
        return row.node in self._nodes

    def _seat_text(self, position: int, slot: int) -> None:
        self._slots[position] = slot
        self._text_mask[slot] = 0
        self._positions[slot] = position
        self._computed = position + 1

    def _free_text(self, start: int, end: int) -> None:
        for position in range(start, end):
            slot = self._slots[position]
            if slot != _NONE:
                self._slots[position] = _NONE
                self._text_mask[slot] = MASKED
                self._free.append(slot)

    def _slide(self, window: int) -> None:
        self._free_text(self._window, min(window, len(self._slots)))
        self._window = window

    def _fit_text(self) -> None:
        """Move to the context that holds text and tree, and slide when there is none."""
        length = len(self._tokens)
        fitting = (size for size in self._contexts if length + tree_room(size) <= size)
        wanted = next(fitting, self._contexts[-1])
        if wanted > self._context:
            self._move(wanted)
        window = length - (self._context - self.room)
        if window > self._window:
            self._slide(window)

    def _allocate(self, context: int) -> None:
        shape = self._shape
        size = (1, shape.kv_heads, context, shape.head_dim)
        self._context = context
        self._keys = [self._zeros(size, shape.dtype) for _ in range(shape.layers)]
        self._values = [self._zeros(size, shape.dtype) for _ in range(shape.layers)]
        self._text_mask = np.full(context, MASKED, shape.dtype)
        self._positions = np.zeros(context, np.int64)  # of what a used slot holds
        self._free = list(range(context))[::-1]
        self._buffers = {f"k_{layer}": self._keys[layer] for layer in range(shape.layers)}
        self._buffers |= {f"v_{layer}": self._values[layer] for layer in range(shape.layers)}

    def _move(self, context: int) -> None:
        """Copy what is used into the first slots of new buffers of `context` slots."""
        old, used = [*self._keys, *self._values], sorted(self.occupied())
        positions = self._positions
        self._allocate(context)
        self._positions[: len(used)] = positions[used]
        for new, array in zip([*self._keys, *self._values], old, strict=True):
            new[:, :, : len(used)] = array[:, :, used]
        moved = {slot: index for index, slot in enumerate(used)}
        self._slots = [moved.get(slot, _NONE) for slot in self._slots]
        self._nodes = {
            node: _Seat(moved[seat.slot], seat.position, seat.token)
            for node, seat in self._nodes.items()
        }
        self._text_mask[[slot for slot in self._slots if slot != _NONE]] = 0
        del self._free[context - len(used) :]


def tree_room(context: int) -> int:
    """How many of `context` slots are meant for the tree: TREE_ROOM, or half of a small context."""
    return min(TREE_ROOM, context // 2)


def check_finite(what: str, values: Array) -> None:
    """Raise UnitFailed when `values` holds NaN or infinity."""
    if not np.isfinite(values).all():
        raise UnitFailed(
            f"the drafter's {what} are not finite; the step is dropped, and the text goes on "
            "without the drafter"
        )
