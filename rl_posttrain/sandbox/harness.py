"""Inside a run: loads the candidate and answers questions. Untrusted as soon as candidate code is loaded.

Requests come on descriptor 3, replies leave on 4: a 4-byte big-endian length, then JSON. Every reply
repeats the random id of its request, so that a reply written before its question counts as tampering.
Standard library only, Python 3.9 or newer.

    {"id", "code"}                         load; reply {"id", "ok": true}
    {"id", "entry", "arguments": encoded}  call; reply {"id", "value": encoded}
    where it raised                        reply {"id", "error": [type, message, traceback]}
"""

import _sitebuiltins
import atexit
import builtins
import json
import linecache
import os
import struct
import sys
import threading
import traceback
import types
from typing import Any

import codec  # from the same folder; as a package module it is rl_posttrain.sandbox.codec
import objects  # imports this module, too

REQUESTS, REPLIES = 3, 4
FRAMES = 8  # of a traceback


def read_exactly(count):
    data = b""
    while len(data) < count:
        part = os.read(REQUESTS, count - len(data))
        if not part:
            os._exit(0)  # the judge has no more questions
        data += part
    return data


def receive():
    (length,) = struct.unpack(">I", read_exactly(4))
    return json.loads(read_exactly(length))


def send(payload):
    data = struct.pack(">I", len(payload)) + payload
    while data:
        data = data[os.write(REPLIES, data) :]


def describe(error, file):
    """[type, message, traceback from the candidate's first frame on] of an exception, bounded."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != file:
        trace = trace.tb_next
    try:
        message = str(error)
    except BaseException:  # the candidate's own __str__
        message = "<message cannot be shown>"
    lines = traceback.format_exception(type(error), error, trace, limit=-FRAMES, chain=False)
    return [type(error).__name__[:200], message[:500], "".join(lines)[-4000:]]


def load(name, file, code):
    """Runs `code` as the module `name`, with its lines known to tracebacks. Returns the module."""
    module = types.ModuleType(name)
    module.__file__ = file
    module.__dict__["__builtins__"] = builtins
    sys.modules[name] = module
    linecache.cache[file] = (len(code), None, code.splitlines(True), file)
    try:
        compiled = compile(code, file, "exec", dont_inherit=True)
    except ValueError as error:  # null characters, before Python 3.12
        raise SyntaxError(str(error)) from None
    exec(compiled, module.__dict__)
    return module


def prepare(file, buffered):
    """Streams and builtins as a program finds them. Bytes that are not UTF-8 are the candidate's to meet."""
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    buffering = -1 if buffered else 1
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", buffering=buffering, closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
    # Normally added by `site`, which the fork server does not load.
    builtins.exit = _sitebuiltins.Quitter("exit", "Ctrl-D (i.e. EOF)")
    builtins.quit = _sitebuiltins.Quitter("quit", "Ctrl-D (i.e. EOF)")
    sys.argv = [file]
    sys.path[:] = [path for path in sys.path if path != "/harness"]


def resolve(module, entry) -> Any:
    """`entry` in the module: a function, or `Class.method` on a fresh instance."""
    found = module
    for name in entry.split("."):
        found = getattr(found() if isinstance(found, type) else found, name)
    return found


def answer_calls():
    """Function-call tests: load once, then one call per question until the judge closes the pipe."""
    prepare("solution.py", buffered=False)
    request = receive()
    name = json.dumps(request["id"]).encode()
    try:
        module = load("solution", "solution.py", request["code"])
    except BaseException as error:  # SystemExit too: leaving during import is not success
        send(b'{"id":%s,"error":%s}' % (name, json.dumps(describe(error, "solution.py")).encode()))
        os._exit(1)
    send(b'{"id":%s,"ok":true}' % name)
    while True:
        request = receive()
        name = json.dumps(request["id"]).encode()
        try:
            arguments = codec.real_value(codec.from_json(request["arguments"]))
            value = codec.encode(resolve(module, request["entry"])(*arguments))
            sys.stdout.flush()
            sys.stderr.flush()
            reply = b'{"id":%s,"value":%s}' % (name, value)
        except BaseException as error:
            reply = b'{"id":%s,"error":%s}' % (name, json.dumps(describe(error, "solution.py")).encode())
        send(reply)


def run_program():
    """A stdin/stdout program in this interpreter, with the meaning of `python main.py`.

    An uncaught exception is also reported on the reply pipe, in pieces that need no parsing of stderr.
    """
    prepare("main.py", buffered=True)
    request = receive()
    os.close(REQUESTS)
    code = 0
    try:
        load("__main__", "main.py", request["code"])
    except SystemExit as error:
        code = _exit_code(error.code)
    except BaseException as error:
        parts = describe(error, "main.py")
        sys.stderr.write(parts[2])
        send(b'{"id":%s,"error":%s}' % (json.dumps(request["id"]).encode(), json.dumps(parts).encode()))
        code = 1
    try:  # as the interpreter does at its end: waits for threads that are not daemons
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:
        sys.stderr.write(describe(error, "main.py")[2])
        code = code or 120
    os._exit(code & 255)


def run_suite():
    """A pytest suite in this process, over the candidate as the module `solution`; see `referee.py`."""
    import referee  # from the same folder

    referee.run_suite()


def serve_referee():
    """Trusted tests or checkers, which reach the candidate through the judge."""
    import referee  # imported by the fork server already

    referee.serve()


def answer_objects():
    """Tests elsewhere that hold objects of the candidate's."""
    objects.answer_objects()


MODES = {
    "calls": answer_calls,
    "objects": answer_objects,
    "program": run_program,
    "suite": run_suite,
    "referee": serve_referee,
}


def _exit_code(code):
    if code is None:
        return 0
    if isinstance(code, int):
        return int(code)
    print(code, file=sys.stderr)
    return 1
