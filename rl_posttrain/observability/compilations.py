"""How many programs XLA compiled: a run should compile a handful, whatever the lengths of its prompts."""

from __future__ import annotations

from jax import monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """Counts compilations (programs loaded from the persistent cache included) while it is open."""

    def __init__(self):
        self.count = 0
        self.seconds = 0.0
        self._open = False

    def __enter__(self) -> Compilations:
        self._open = True
        monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if self._open and event == _EVENT:
            self.count += 1
            self.seconds += duration_secs

    def __exit__(self, *_: object) -> None:
        self._open = False
        monitoring.unregister_event_duration_listener(self._listen)
