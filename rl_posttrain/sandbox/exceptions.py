"""Inside the referee: exceptions of the candidate's, as trusted tests meet them.

One crosses as the class of Python's that it derives from, if that is an ordinary one; its own classes are made
anew, by name, below that. It never is a skip, the end of the session or the end of an iteration. Standard
library only, Python 3.9 or newer.
"""

import builtins

import objects  # from the same folder

# StopIteration would silently end a loop of the test's, such as `for answer in map(solve, cases)`.
REFUSED_ERRORS = (StopIteration, StopAsyncIteration, getattr(builtins, "BaseExceptionGroup", StopIteration))
LIBRARY_ERRORS = (
    "json.decoder.JSONDecodeError decimal.InvalidOperation decimal.DivisionByZero statistics.StatisticsError "
    "dataclasses.FrozenInstanceError struct.error queue.Empty queue.Full binascii.Error re.error zlib.error"
).split()


def known_class(name):
    """The class of this side's that an exception of the candidate's may become; None if it must not."""
    if name in LIBRARY_ERRORS:
        module, _, attribute = name.rpartition(".")
        return getattr(__import__(module, fromlist=[attribute]), attribute)
    found = getattr(builtins, name, None)
    if not (isinstance(found, type) and issubclass(found, Exception)) or issubclass(found, REFUSED_ERRORS):
        return None
    return found


def exception_class(family, classes):
    """The class that stands for one of the candidate's, given by its MRO; `classes` holds those by handle."""
    if not family:
        return RuntimeError
    (handle, name), *rest = family
    if handle is None:
        return known_class(name) or exception_class(rest, classes)
    if handle.name not in classes:
        parent = exception_class(rest, classes)
        known = next((known_class(name) for own, name in rest if own is None and known_class(name)), None)
        bases = (parent,) if known is None or issubclass(parent, known) else (parent, known)
        body = {"_candidate_handle": handle.name, "_candidate_message": None, "__str__": message_of}
        body["__getattr__"] = error_attribute
        try:
            classes[handle.name] = type(class_name(name), bases, body)
        except TypeError:  # bases that do not go together here
            classes[handle.name] = type(class_name(name), (parent,), body)
    return classes[handle.name]


def class_name(name):
    name = name.rpartition(".")[2]
    return name if name.isidentifier() else "CandidateError"


def message_of(error):
    if error._candidate_message is None:  # raised by a test
        return BaseException.__str__(error)
    return error._candidate_message


def error_attribute(error, name):
    if name.startswith("_") or "_candidate_remote" not in vars(error):
        raise AttributeError(name)
    return getattr(error._candidate_remote, name)


def made_bare(error_class, message):
    """An exception without a call of its constructor."""
    try:
        error = error_class.__new__(error_class)
    except TypeError:
        error = RuntimeError()
    error.args = (message,)
    return error


def candidate_error(body, classes, find):
    """The exception of this side's for one that the candidate raised; `find(handle)` gives proxies."""
    (kind, message, _), family, arguments, handle = body
    found = exception_class(family, classes)
    try:
        error = found(*objects.from_wire(arguments, find))
    except Exception:  # a constructor with a mind of its own
        error = made_bare(found, message)
    if found.__name__ != class_name(kind):  # nothing ordinary: SystemExit, say
        error = type(class_name(kind), (found,), {"__str__": message_of})(message)
    error._candidate_message = message  # type: ignore[attr-defined]
    error._candidate_remote = find(handle.name)  # type: ignore[attr-defined]
    return error
