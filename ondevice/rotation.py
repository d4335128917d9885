"""DESIGN's queue rule: whoever waits has a turn before anyone has two."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Rotation(Generic[Item]):
    """Items of several owners for one taker: owners in turn, each one's own items in order.

    An item stays at the head of its owner's queue until it is `done`; `again` sends the owner to
    the back, so that an item of many turns lets others in between without losing its place. The
    queue of owners is a SimpleQueue: a put and a get cost 1 us, a Condition's wait and notify 15.
    """

    def __init__(self) -> None:
        self._items: dict[Hashable, deque[Item]] = {}
        self._owners: queue.SimpleQueue[Hashable | None] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def put(self, owner: Hashable, item: Item) -> None:
        """Add an item, from any thread. owner: anything but None."""
        with self._lock:
            if owner in self._items:
                self._items[owner].append(item)
                return
            self._items[owner] = deque([item])
        self._owners.put(owner)

    def take(self) -> tuple[Hashable, Item] | None:
        """Wait for the next owner, and its first item; None once `stop` has its turn."""
        while (owner := self._owners.get()) is not None:
            with self._lock:
                if owner in self._items:  # else drained meanwhile
                    return owner, self._items[owner][0]
        return None

    def done(self, owner: Hashable) -> None:
        """The item of `owner` that was taken is finished; its next one goes to the back."""
        with self._lock:
            items = self._items.get(owner)
            if items is None:
                return
            items.popleft()
            if not items:
                del self._items[owner]
                return
        self._owners.put(owner)

    def again(self, owner: Hashable) -> None:
        """The item that was taken needs another turn, after all those who wait."""
        self._owners.put(owner)

    def others_wait(self) -> bool:
        """Whether anybody waits for the one who took an item."""
        return not self._owners.empty()

    def stop(self) -> None:
        """Make one `take` return None, after the turns of those who wait now."""
        self._owners.put(None)

    def drain(self) -> list[Item]:
        """Take away every item, the one at work included."""
        with self._lock:
            items = [item for owned in self._items.values() for item in owned]
            self._items.clear()
            return items
