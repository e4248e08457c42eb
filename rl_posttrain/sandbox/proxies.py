"""Inside the referee: the candidate's module and objects as trusted tests see them, over plain values.

Every use is a question that the judge relays, see `objects.py`. Nothing of the candidate's runs here, and
no question may hand it what a test expects. So a proxy refuses to be compared or taken for true or false;
and an object that a function returned in place of plain data is not asked what a string, number or tuple
would be asked (`.startswith`, `+`). An instance of a class that the test itself calls by a CapWords name may
answer for itself, except to comparisons. An exception crosses as the builtin class it derives from, if that
is an ordinary one: never as a skip, the end of the session or the end of an iteration. Standard library
only, Python 3.9 or newer.
"""

import builtins
import collections
import json
import sys
import types
from typing import Any

import codec  # from the same folder
import exceptions
import harness
import objects

ITEMS = 100_000  # of one iterator
SINGLE_ITEMS = 64  # asked for one by one, before an iterator is read ahead at all
BATCH = 1000
NOT_ASKED = ("__", "_mock", "_pytest")  # attributes that Python and pytest look for, not tests
NOT_BOUND = ("_", "test", "pytest")  # names that would be tests, or hooks, of the tests' own
PLAIN = (str, bytes, int, float, complex, tuple, frozenset)
PLAIN_METHODS = {name for kind in PLAIN for name in dir(kind) if not name.startswith("__")}
BINARY = "add sub mul matmul truediv floordiv mod pow lshift rshift and or xor".split()
UNARY = "neg pos abs invert".split()


class CandidateEnded(BaseException):
    """The candidate's process is gone. Not an `Exception`, so that no test can expect it."""


class CannotCross(TypeError):
    """A test hands over what is not plain data."""


class Link:
    """What has crossed so far."""

    def __init__(self):
        self.influenced = False  # has the candidate said anything that the tests may depend on?
        self.ended = False  # has a test met the candidate's end? Reset by who runs the tests
        self.unusable = ""  # what the tests have done wrong
        self.errors = []  # the candidate's exceptions; the judge counts them alike
        self.remotes = {}
        self.classes = {}
        self.originals = {}  # of attributes that a test has set

    def serial(self, error):
        """Which of the candidate's exceptions this is; None for one of the tests' own."""
        return next((index for index, each in enumerate(self.errors) if each is error), None)


link = Link()


def name_of(value):
    """How an argument that is not plain data crosses: the handle that it stands for, or the name of a builtin."""
    if type(value) is Remote and value._Remote__number is not None:
        return f"{value._Remote__number} {value._Remote__kind}"
    remote = vars(value).get("_candidate_remote") if isinstance(value, BaseException) else None
    if remote is not None:
        return name_of(remote)
    handle = vars(value).get("_candidate_handle") if isinstance(value, type) else None
    if handle is not None:
        return handle
    name = getattr(value, "__name__", None)
    if type(name) is str and getattr(builtins, name, None) is value:
        return f"{objects.BUILTIN} {name}"
    what = (
        f"a test hands the candidate a {type(value).__qualname__}: only plain values (None, bool, int, float, "
        "complex, str, bytes, list, tuple, dict, set), builtins and the candidate's own objects can cross"
    )
    if isinstance(value, types.FunctionType) or not link.influenced:  # it cannot be of the candidate's making
        link.unusable = what
    raise CannotCross(what)


def find(name):
    """The proxy of a handle; always the same one, so that `is` works."""
    number, _, kind = name.partition(" ")
    number = int(number) if number.isascii() and number.isdigit() else -1
    if number not in link.remotes:
        link.remotes[number] = Remote(number, kind)
    return link.remotes[number]


def ask(operation, number, path, arguments=(), keywords=None) -> Any:
    """The answer to one question.

    Raises:
      Exception: what the candidate raised, as a class of this side's.
      CandidateEnded, CannotCross: see there.
    """
    keywords = keywords or {}
    question = {"operation": operation, "handle": number, "path": path}
    question["arguments"] = objects.to_wire(list(arguments), name_of)
    question["keywords"] = objects.to_wire(keywords, name_of)
    harness.send(json.dumps({"ask": question}).encode())
    reply = harness.receive()
    before, link.influenced = link.influenced, True  # whatever goes wrong from here on
    if "ended" in reply:
        link.ended = True
        raise CandidateEnded(reply["ended"])
    kind, body, mutated, printed = codec.from_json(reply["result"])
    error: Any = None
    if kind == "error":
        error = exceptions.candidate_error(body, link.classes, find)
        link.errors.append(error)
    value: Any = None
    try:
        if error is None:
            value = exceptions.exception_class(body, link.classes) if kind == "class" else objects.from_wire(body, find)
        if mutated is not None:
            renew([list(arguments), keywords], objects.from_wire(mutated, find))
    except (TypeError, ValueError) as reason:  # unhashable keys: no object of Python's looks like that
        error = RuntimeError(f"the candidate's answer is malformed: {reason}")
    sys.stdout.write(printed.encode("utf-8", "backslashreplace").decode())
    if error is not None:
        raise error
    defined = kind == "class" or (type(value) is Remote and value._Remote__kind in ("function", "type"))
    if operation == "get" and number is None and defined:
        link.influenced = before  # it has shown no more than that it has this function
    return value


def renew(old, new):
    """Makes `old`, a test's own object, equal to what the candidate made of it. Returns what stands in its place."""
    if isinstance(old, list) and isinstance(new, list):
        old[:] = [renew(old[index], item) if index < len(old) else item for index, item in enumerate(new)]
    elif isinstance(old, dict) and isinstance(new, dict):
        renewed = {key: renew(old[key], item) if key in old else item for key, item in new.items()}
        old.clear()
        old.update(renewed)
    elif isinstance(old, set) and isinstance(new, set):
        old.intersection_update(new)
        old.update(new)
    elif type(old) is tuple and type(new) is tuple and len(old) == len(new):
        for mine, theirs in zip(old, new):
            renew(mine, theirs)
    else:
        return new
    return old


# ---- objects ----


class Remote:
    """The candidate's object `number`, or the module's `path`; its methods ask the candidate."""

    __number: Any
    __kind: str
    __path: list
    # "class": one that the test calls by its name; "instance": what it made of one; "": anything else.
    __named: str
    __items: collections.deque  # read ahead, of an iterator
    __taken: int  # items of an iterator so far

    def __init__(self, number, kind, path=(), named=""):
        self.__dict__.update(_Remote__number=number, _Remote__kind=kind, _Remote__path=list(path))
        self.__dict__.update(_Remote__named=named, _Remote__items=collections.deque(), _Remote__taken=0)

    def __ask(self, operation, /, *arguments, **keywords) -> Any:
        return ask(operation, self.__number, self.__path, arguments, keywords)

    def __refuse(self, what):
        link.influenced = True
        raise TypeError(f"{what} the candidate's {self.__kind!r} object: tests decide over plain values only")

    def __getattr__(self, name):
        if name.startswith(NOT_ASKED) and name not in ("__name__", "__doc__"):
            raise AttributeError(name)
        value = self.__ask("get", name)
        if type(value) is Remote and name in PLAIN_METHODS and not self.__named:
            self.__refuse(f"asks .{name} of")
        return value

    def __setattr__(self, name, value):
        set_attribute(self.__number, self.__path, name, value)

    def __delattr__(self, name):
        delete_attribute(self.__number, self.__path, name)

    def __call__(self, /, *arguments, **keywords):
        value = self.__ask("call", *arguments, **keywords)
        return name_as("instance", value) if self.__named == "class" else value

    def __compare(self, other):
        self.__refuse("compares")

    __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __compare  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    def __bool__(self):
        return self.__ask("truth") is True  # no more than a plain True or False would say

    def __len__(self):
        return self.__ask("length")

    def __getitem__(self, key):
        return self.__ask("item", key)

    def __setitem__(self, key, value):
        self.__ask("set_item", key, value)

    def __delitem__(self, key):
        self.__ask("delete_item", key)

    def __contains__(self, value):
        if self.__named:
            return self.__ask("contains", value) is True
        return any(item is value or item == value for item in self)

    def __iter__(self):
        found = self.__ask("iterate")
        return iter(found) if type(found) is list else found

    def __next__(self):
        if not self.__items:
            taken = self.__taken
            if taken > ITEMS:
                self.__refuse(f"takes more than {ITEMS} items from")
            found = self.__ask("next", 1 if taken < SINGLE_ITEMS else min(taken // 4, BATCH))
            if type(found) is not list or not found:
                raise StopIteration
            self.__items.extend(found)
            self.__dict__["_Remote__taken"] = taken + len(found)
        return self.__items.popleft()

    def __str__(self):
        return self.__ask("text")

    def __repr__(self):
        return self.__ask("representation")

    def __instancecheck__(self, value):
        return type(value) is Remote and self.__ask("instance", value) is True

    def __enter__(self):
        return self.__ask("enter")

    def __exit__(self, kind, error, trace):
        if error is None or link.serial(error) is None:  # a failure of the test's is not the candidate's to hide
            self.__ask("exit", None if error is None else "Exception", None)
            return False
        handle = getattr(error, "_candidate_remote", None)
        return self.__ask("exit", type(error).__name__, handle) is True

    def __apply(self, name, *operands):
        if not self.__named:
            self.__refuse(f"asks for operator.{name} of")
        return name_as("instance", ask("apply", None, [], (name, *operands)))


def _binary(name):
    return (
        lambda self, other: self._Remote__apply(name, self, other),
        lambda self, other: self._Remote__apply(name, other, self),
    )


for _name in BINARY:
    _operator = _name + "_" if _name in ("and", "or") else _name
    _forward, _reflected = _binary(_operator)
    setattr(Remote, f"__{_name}__", _forward)
    setattr(Remote, f"__r{_name}__", _reflected)
for _name in UNARY:
    setattr(Remote, f"__{_name}__", lambda self, name=_name: self._Remote__apply(name, self))


def name_as(what, value):
    if type(value) is Remote:
        value.__dict__["_Remote__named"] = what
    return value


def is_class_name(name):
    """Whether a test that writes this name means a class: CapWords."""
    return name[:1].isupper() and name != name.upper()


def entry(path):
    """The function or class `path` of the candidate's module."""
    parts = path.split(".")
    return Remote(None, "entry", parts, named="class" if is_class_name(parts[-1]) else "")


def set_attribute(number, path, name, value):
    if (number, name) not in link.originals:
        try:
            link.originals[number, name] = ask("get", number, path, (name,))
        except AttributeError:
            pass
    ask("set", number, path, (name, value))


def delete_attribute(number, path, name):
    """Restores what a test has set: pytest's monkeypatch takes the attribute for one of the proxy's own."""
    if (number, name) in link.originals:
        ask("set", number, path, (name, link.originals.pop((number, name))))
    else:
        ask("delete", number, path, (name,))


class Solution(types.ModuleType):
    """The module `solution`: every look at a name is a question."""

    def __getattr__(self, name):
        if name == "__all__":
            return star_names(sys._getframe(1).f_globals)
        if name.startswith(NOT_ASKED):
            raise AttributeError(name)
        try:
            value = ask("get", None, [], (name,))
        except AttributeError:
            # `from solution import name` falls back to this, so that the tests that use it fail, one by one.
            sys.modules[f"solution.{name}"] = entry(name)  # type: ignore[assignment]
            raise
        return name_as("class", value) if is_class_name(name) else value

    def __setattr__(self, name, value):
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            set_attribute(None, [], name, value)

    def __delattr__(self, name):
        delete_attribute(None, [], name)


def star_names(taken):
    """What `from solution import *` binds in a test's module: nothing that means something there already."""
    found = ask("names", None, [])
    names = [name for name in found if type(name) is str and name.isidentifier()] if type(found) is list else []
    return [n for n in names if n not in taken and not hasattr(builtins, n) and not n.lower().startswith(NOT_BOUND)]


def install():
    """Makes `import solution` give the candidate."""
    sys.modules["solution"] = Solution("solution")
