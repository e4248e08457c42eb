"""(1) What to ask: procedural domains by name, their verifiers, and the mixture over them.

domain = load("strings/reverse", {"max_length": 8}, Tools())
tasks = domain.make(seed, "train", range(4))
verdicts = domain.score(tasks, [task.demonstration for task in tasks])
"""

from rl_posttrain.tasks import code, math, reasoning, strings  # noqa: F401  (each registers its family)
from rl_posttrain.tasks.registry import (
    Domain,
    FunctionCheck,
    PromptSpaceError,
    Tools,
    heldout,
    load,
    names,
    register,
)

__all__ = ["Domain", "FunctionCheck", "PromptSpaceError", "Tools", "heldout", "load", "names", "register"]
