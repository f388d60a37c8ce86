"""An asyncio loop in a thread of its own, for ipyparallel's launchers.

The launchers need a loop that lives longer than one call. The main thread of a notebook already runs a loop.
A loop for one call would be closed before the launchers' threads can report to it that a process has ended.
"""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """Runs coroutines for callers that cannot await them."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cluster launchers", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run a coroutine, and wait for its result.

        Args:
            coroutine: The coroutine. An error that it raises is raised here.
            timeout: The longest time to wait, in seconds.

        Raises:
            TimeoutError: The coroutine took longer than `timeout`.
        """
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    def close(self) -> None:
        """Stop the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
