"""What was compiled, by what it depends on."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """Keeps the results that were asked for last. May be used by several threads at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        # The one that was used last at the end.
        self._results: collections.OrderedDict[Hashable, T] = collections.OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """That of the key; two threads may both make one."""
        with self._lock:
            if key in self._results:
                self._results.move_to_end(key)
                return self._results[key]
        made = make()
        with self._lock:
            self._results[key] = made
            while len(self._results) > self._most:
                self._results.popitem(last=False)
        return made
