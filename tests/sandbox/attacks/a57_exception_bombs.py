# Exceptions that cannot be shown: recursion in __str__, megabytes of notes, frames and name, surrogates, a chain that
# loops.
class Recursive(Exception):
    def __str__(self):
        return f"{self}"

    __repr__ = __str__


class Huge(Exception):
    __notes__ = ["x" * (8 << 20)]

    def __str__(self):
        return "\ud800\udfff" * (1 << 20)


class Lying(Exception):
    def __str__(self):
        return type("Text", (str,), {"__getitem__": lambda self, key: self, "__len__": lambda self: 0})("49\udcff")


class Stubborn(Exception):
    @property
    def __notes__(self):
        raise self

    @property
    def __cause__(self):
        raise self


KINDS = [type("N" * 100_000, (kind,), {}) for kind in (Recursive, Huge, Lying, Stubborn)]
asked = 0


def deep(error, levels):
    if levels == 0:
        if not isinstance(error, Stubborn):
            error.__cause__ = error.__context__ = KINDS[0]()
            error.__cause__.__cause__ = error
        raise error
    deep(error, levels - 1)


def solve(n):
    global asked
    asked += 1
    deep(KINDS[asked % len(KINDS)]("\udcff"), 900)
