"""A judgement that waits or runs: what the pool's threads work on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rl_posttrain.sandbox.session import Session
from rl_posttrain.sandbox.slot import Slot


class Submission(Future):
    """What `Pool.submit` returns. `cancel` also ends a run in progress; `result` then raises CancelledError."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped = False
        self.slots: set[Slot] = set()  # in use for it
        self.lock = threading.Lock()

    def cancel(self) -> bool:
        """Ends it, before or during its run. False when it is done already."""
        if super().cancel():
            return True
        with self.lock:
            if self.done():
                return False
            self.stopped = True
            for slot in self.slots:
                slot.cancel()
        return True

    def guard(self, driver: Callable[[Session], Any]) -> Callable[[Session], Any]:
        """`driver` of a run, which ends at once where the cancel came before there was a run to end."""

        def guarded(session: Session) -> Any:
            if self.stopped:
                session.kill("cancelled")
            return driver(session)

        return guarded


current = threading.local()  # .submission: what this worker thread is working on
