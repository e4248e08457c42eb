"""Inside a run: shows the candidate's objects to tests that live elsewhere, as plain values and as handles.

Untrusted as soon as candidate code is loaded, like `harness.py`, which has the framing. Plain values cross
by value; any other object stays here, and crosses as the opaque name "NUMBER TYPE", its handle. The same
object always has the same handle. Standard library only, Python 3.9 or newer.

    {"id", "code"}    load; reply {"id", "ok": true} or {"id", "error": [type, message, traceback]}
    {"id", "operation", "handle", "path", "arguments", "keywords"}    reply {"id", "result": RESULT}

`operation` is one of OPERATIONS, on the object `handle` or on the module's `path` ("Class.method": on a fresh
instance). RESULT is [kind, body, mutated, printed], encoded:

    "value", value    "items", [item, ...]      "class", [[handle or None, name], ...]: an exception class's MRO
    "error", [[type, message, traceback], MRO, arguments, handle of the exception]

`mutated` is None, or [arguments, keywords] as they are after the call changed them. `printed` is what
`print` wrote meanwhile.
"""

import builtins
import collections.abc
import itertools
import json
import operator
import os
import sys
from typing import Any

import codec  # from the same folder
import harness

FILE = "solution.py"
ITEMS = 100_000  # of one iteration over an object that knows its length
BUILTIN = "builtin"  # in place of a number, before the name of a function or class that both sides have
PRINTED = 1 << 16  # characters of one operation's output that are passed on


def to_wire(value, name, depth=0) -> Any:
    """`value` in the notation of `codec`; `name(value)` names what is not plain data.

    Subclasses of plain types cross as their plain base: a Counter is a dict, a named tuple a tuple.
    """
    if depth > codec.MAXIMUM_DEPTH:
        return {"o": "too deeply nested"}
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        # The plain type's own methods, not the subclass's: what the data is, not what it says that it is.
        if isinstance(value, dict):
            pairs = dict.items(value)
            return {"d": [[to_wire(key, name, depth + 1), to_wire(item, name, depth + 1)] for key, item in pairs]}
        kind: Any = next(kind for kind in (list, tuple, set, frozenset) if isinstance(value, kind))
        items = [to_wire(item, name, depth + 1) for item in kind.__iter__(value)]
        return items if kind is list else {"t" if kind is tuple else "s": items}
    tree = codec.to_json(value, depth)
    return {"o": name(value)} if type(tree) is dict and "o" in tree else tree


def from_wire(value, find) -> Any:
    """A decoded value with dicts and sets made real, and `find(name)` for what was not plain data.

    Raises:
      TypeError: keys of a dict or members of a set are not hashable.
    """
    kind = type(value)
    if kind is codec.Pairs:
        return {from_wire(key, find): from_wire(item, find) for key, item in value}
    if kind is codec.Members:
        return {from_wire(item, find) for item in value}
    if kind is list:
        return [from_wire(item, find) for item in value]
    if kind is tuple:
        return tuple(from_wire(item, find) for item in value)
    return find(value.name) if kind is codec.Opaque else value


class Handles:
    """The objects that tests hold, by number, and iterators' errors that wait for their turn."""

    def __init__(self):
        self._objects = []
        self._numbers = {}
        self.pending = {}

    def name(self, value):
        if id(value) not in self._numbers:  # held below, so that the id stays its own
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return f"{self._numbers[id(value)]} {type(value).__qualname__}"

    def find(self, name):
        number, _, kind = name.partition(" ")
        return getattr(builtins, kind) if number == BUILTIN else self._objects[int(number)]

    def object(self, number):
        return self._objects[number]


class Printed:
    """Stands for stdout: writes through, and remembers what was written."""

    def __init__(self, stream):
        self._stream = stream
        self._parts = []
        self._room = PRINTED

    def write(self, text):
        count = self._stream.write(text)
        self._parts.append(text[: self._room])
        self._room -= len(self._parts[-1])
        return count

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def take(self):
        text = "".join(self._parts)
        self._parts, self._room = [], PRINTED
        return text


def iterate(target):
    """All items where the object knows how many there are; otherwise its iterator, which `advance` asks."""
    if isinstance(target, collections.abc.Sized) and not isinstance(target, collections.abc.Iterator):
        items = list(itertools.islice(target, ITEMS + 1))  # type: ignore[call-overload]
        if len(items) > ITEMS:
            raise ValueError(f"an iteration over more than {ITEMS} items")
        return Items(items)
    return iter(target)


class Items(list):
    """What an iteration gave."""


def advance(handles, target, count):
    """The next `count` items of an iterator; fewer at its end, or before an error, which is then raised."""
    if id(target) in handles.pending:
        raise handles.pending.pop(id(target))
    items = Items()
    try:
        for _ in range(count):
            items.append(next(target))
    except StopIteration:
        pass
    except BaseException as error:
        if not items:
            raise
        handles.pending[id(target)] = error
    return items


def public_names(target):
    """What `from solution import *` binds."""
    return list(getattr(target, "__all__", [name for name in vars(target) if not name.startswith("_")]))


def call(target, /, *arguments, **keywords):
    return target(*arguments, **keywords)


def leave(target, kind, error):
    """The end of a `with` block, which an exception named `kind` ends; `error` where it is the candidate's own."""
    if kind is None:
        return type(target).__exit__(target, None, None, None)
    if error is None:
        error = getattr(builtins, kind, Exception)()
    return type(target).__exit__(target, type(error), error, None)


OPERATIONS = {
    "call": call,
    "get": getattr,
    "set": setattr,
    "delete": delattr,
    "length": len,
    "truth": bool,
    "item": operator.getitem,
    "set_item": operator.setitem,
    "delete_item": operator.delitem,
    "contains": operator.contains,
    "iterate": iterate,
    "text": str,
    "representation": repr,
    "instance": lambda target, value: isinstance(value, target),
    "names": public_names,
    "enter": lambda target: type(target).__enter__(target),
    "exit": leave,
    "apply": lambda module, name, *operands: getattr(operator, name)(*operands),
}


def family(error_class, handles):
    """The MRO of an exception class: [handle of a class of the candidate's or None, qualified name]."""
    found = []
    for each in error_class.__mro__[:20]:
        own = each.__module__ == "solution"
        prefix = "" if each.__module__ in ("builtins", "solution") else each.__module__ + "."
        found.append([{"o": handles.name(each)} if own else None, (prefix + each.__qualname__)[:200]])
    return found


def describe(error, handles):
    parts = harness.describe(error, FILE)
    error.__traceback__ = None  # it would keep every frame's objects alive
    try:
        arguments = to_wire(list(error.args), handles.name)
    except BaseException:
        arguments = []
    return [parts, family(type(error), handles), arguments, {"o": handles.name(error)}]


def perform(request, module, handles):
    """[kind, body, mutated] of one operation, as trees that `json` writes."""
    arguments, keywords = [], {}
    decoded = False
    try:
        if request["handle"] is not None:
            target = handles.object(request["handle"])
        else:
            target = harness.resolve(module, ".".join(request["path"])) if request["path"] else module
        arguments = from_wire(codec.from_json(request["arguments"]), handles.find)
        keywords = from_wire(codec.from_json(request["keywords"]), handles.find)
        decoded = True
        if request["operation"] == "next":
            value = advance(handles, target, *arguments)
        else:
            value = OPERATIONS[request["operation"]](target, *arguments, **keywords)
        if isinstance(value, type) and issubclass(value, builtins.BaseException):
            kind, body = "class", family(value, handles)
        else:
            kind, body = "items" if type(value) is Items else "value", to_wire(value, handles.name)
    except BaseException as error:  # whatever it is, it is an answer
        kind, body = "error", describe(error, handles)
    mutated = None
    if decoded:
        after = [to_wire(arguments, handles.name), to_wire(keywords, handles.name)]
        if after != [request["arguments"], request["keywords"]]:
            mutated = after
    return [kind, body, mutated]


def answer_objects():
    """Loads the candidate, then one operation per question until the judge closes the pipe."""
    harness.prepare(FILE, buffered=False)
    request = harness.receive()
    name = json.dumps(request["id"]).encode()
    try:
        module = harness.load("solution", FILE, request["code"])
    except BaseException as error:  # SystemExit too: leaving during import is not success
        harness.send(b'{"id":%s,"error":%s}' % (name, json.dumps(harness.describe(error, FILE)).encode()))
        os._exit(1)
    sys.stdout = printed = Printed(sys.stdout)
    harness.send(b'{"id":%s,"ok":true}' % name)
    handles = Handles()
    while True:
        request = harness.receive()
        name = json.dumps(request["id"]).encode()
        result = perform(request, module, handles)
        sys.stdout.flush()
        sys.stderr.flush()
        harness.send(b'{"id":%s,"result":%s}' % (name, json.dumps([*result, printed.take()]).encode()))
