"""Runs trusted tests in a sandbox of their own, where the candidate is a proxy, and trusted checkers.

Also runs white-box suites, in the candidate's own process (`run_suite`). Loaded by the fork server of the
referees' containers, with pytest where it is there. Standard library only, Python 3.9 or newer.

    {"check": source, "entry"} or {"pytest": source}     then questions {"ask": ...} to the candidate, answered
        {"result": RESULT} or {"ended": why}, and at last {"report": {...}}, see `Report`
    {"collect": source}                                  {"report": {...}}, of a suite with a stand-in candidate
    {"checker": source}                                  {"ready": true} or {"failed": why}; then for every
        {"case": [first, second, third]}                 {"result": bool}, {"failed": why} or {"malformed": why}
"""

import builtins
import contextlib
import importlib
import io
import json
import linecache
import os
import sys
import traceback

import codec  # from the same folder
import harness
import objects
import proxies

TOOLS = "/shared/tools"  # pytest and what it needs
CHECK_FILE, SUITE_FILE = "tests.py", "test_suite.py"
PYTEST_ARGUMENTS = ("-c", "/dev/null", "--rootdir=/tmp", "--assert=plain", "--tb=native", "-q", "--no-summary")
# Not needed, and each costs time at every start.
UNUSED_PLUGINS = (
    "cacheprovider doctest faulthandler junitxml legacypath pastebin setuponly setupplan stepwise "
    "threadexception unraisableexception"
).split()
TEXT = 500  # characters that say how a test failed


def serve():
    """Serves one request, in a run of its own."""
    harness.prepare(CHECK_FILE, buffered=False)
    request = harness.receive()
    if "checker" in request:
        run_checker(request["checker"])
    proxies.install()
    report = Report()
    if "check" in request:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            run_check(request["check"], request["entry"], report)
    elif "collect" in request:
        collect(request["collect"], report)
    else:
        run_pytest(request["pytest"], report)
    harness.send(json.dumps({"report": report.message()}).encode())
    os._exit(0)


def preload():
    """Imports pytest, if it is there already. Checks and checkers do not need it."""
    if TOOLS not in sys.path or not os.path.isdir(os.path.join(TOOLS, "pytest")):
        return False
    try:
        config = importlib.import_module("_pytest.config")
        importlib.import_module("pytest")
        for plugin in config.default_plugins:
            importlib.import_module(f"_pytest.{plugin}")
    except ImportError:  # `run_pytest` meets it too, and says so
        return False
    return True


PRELOADED = preload()


class Report:
    """What came of the tests.

    `tests`: [name, outcome, text, number of the candidate's exception or None, whether the candidate ended in
    it]; the outcome is "pass", "wrong", "error" (the candidate raised it) or "skipped". `collection`: the same
    for what kept pytest from finding tests. `unusable`: what is wrong with the tests themselves, "" if nothing;
    `missing`: why pytest cannot be imported, "" if it can. `late`: it was imported by this run alone.
    """

    def __init__(self):
        self.tests = {}
        self.collection = []
        self.unusable = self.missing = ""
        self.late = False

    def message(self):
        fields = {"tests": [[name, *row] for name, row in self.tests.items()], "collection": self.collection}
        fields["unusable"] = self.unusable or proxies.link.unusable
        return {**fields, "missing": self.missing, "late": self.late, "influenced": proxies.link.influenced}

    def failure(self, error, file, source):
        """[outcome, text, serial, ended] of an exception that ended a test."""
        link = proxies.link
        cause = error.__cause__ if error.__cause__ is not None and type(error).__name__ == "CollectError" else error
        serial = link.serial(cause)
        text = shown(cause, file)
        if serial is None and not link.ended and (not link.influenced or missing_module(cause, source)):
            self.unusable = self.unusable or f"it fails before it has asked the candidate anything: {text}"
        return ["wrong" if serial is None and not link.ended else "error", text, serial, link.ended]


class InsideReport(Report):
    """Of a suite in the candidate's own process, where one cannot tell whose an exception is."""

    def failure(self, error, file, source):
        return ["wrong" if isinstance(error, AssertionError) else "error", shown(error, file), None, False]


def missing_module(error, source):
    """Whether a module that the tests import by name is not there, which no candidate brings about."""
    name = getattr(error, "name", None)
    return isinstance(error, ModuleNotFoundError) and str(name).split(".")[0] in source


def shown(error, file):
    """The test's own line, and the exception."""
    try:
        message = str(error)[:TEXT]
    except BaseException as failure:  # of a proxy
        message = f"<{type(failure).__name__}>"
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    place = f"line {lines[-1].lineno}, {lines[-1].line!r}: " if lines else ""
    return f"{place}{type(error).__name__}: {message}"[: 2 * TEXT]


# ---- check(candidate) ----


class Names(dict):
    """Builtins, and for any other name the candidate's: HumanEval's tests use helpers of the prompt's."""

    def __missing__(self, name):
        if name.startswith("__"):
            raise KeyError(name)
        try:
            return getattr(sys.modules["solution"], name)
        except AttributeError:
            raise KeyError(name) from None


def run_check(source, entry, report):
    linecache.cache[CHECK_FILE] = (len(source), None, source.splitlines(True), CHECK_FILE)
    names = {"__name__": "tests", "__builtins__": Names(vars(builtins))}
    try:
        exec(compile(source, CHECK_FILE, "exec", dont_inherit=True), names)
        names["check"](proxies.entry(entry))
    except BaseException as error:
        row = report.failure(error, CHECK_FILE, source)
    else:
        row = ["pass", "", None, False]
        if proxies.link.ended:  # the tests caught the candidate's end, which is nothing to pass by
            row = ["error", "the candidate ended", None, True]
        elif not proxies.link.influenced:
            report.unusable = "it never asks the candidate anything"
    report.tests["check"] = row


# ---- pytest ----


class Results:
    """The plugin that notes what became of each test. The worst of its set-up, call and tear-down counts."""

    def __init__(self, report, file, source):
        self.report, self.file, self.source = report, file, source

    def pytest_collection_modifyitems(self, items):
        for item in items:
            self.report.tests[self.name(item)] = ["skipped", "not run", None, False]

    def name(self, item):
        return item.nodeid.split("::", 1)[1]

    def pytest_runtest_setup(self, item):
        proxies.link.ended = False

    def note_phase(self, item, call, phase):
        name = self.name(item)
        if phase.failed or proxies.link.ended:
            error = call.excinfo.value if call.excinfo else AssertionError("the candidate ended in it")
            if self.report.tests[name][0] not in ("wrong", "error"):
                self.report.tests[name] = self.report.failure(error, self.file, self.source)
        elif phase.skipped and self.report.tests[name][0] in ("pass", "skipped"):
            self.report.tests[name] = ["skipped", str(call.excinfo.value)[:TEXT] if call.excinfo else "", None, False]
        elif phase.when == "call":
            self.report.tests[name] = ["pass", "", None, False]

    def note_collection(self, phase):
        call = getattr(phase, "call", None)
        if phase.failed and call is not None and call.excinfo is not None:
            self.report.collection.append(self.report.failure(call.excinfo.value, self.file, self.source))


def results_plugin(pytest, report, file, source):
    """`Results` with the hooks that need pytest's decorator."""

    class Hooks(Results):
        @pytest.hookimpl(hookwrapper=True)
        def pytest_runtest_makereport(self, item, call):
            outcome = yield
            self.note_phase(item, call, outcome.get_result())

        @pytest.hookimpl(hookwrapper=True)
        def pytest_make_collect_report(self, collector):
            outcome = yield
            self.note_collection(outcome.get_result())

    return Hooks(report, file, source)


def run_pytest(source, report, *options):
    """Real pytest over `source`, in this process."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.path_importer_cache.pop(TOOLS, None)  # the folder may be younger than this container
    report.late = not PRELOADED
    try:
        pytest = importlib.import_module("pytest")
    except Exception as error:
        report.missing = repr(error)
        return
    file = f"/tmp/{SUITE_FILE}"
    with open(file, "w", encoding="utf-8") as stream:
        stream.write(source)
    try:
        compile(source, file, "exec", dont_inherit=True)
    except SyntaxError as error:
        report.unusable = f"it is not Python {sys.version.split()[0]}: {error}"
        return
    arguments = [*PYTEST_ARGUMENTS, *options, *(part for name in UNUSED_PLUGINS for part in ("-p", f"no:{name}")), file]
    plugin = results_plugin(pytest, report, file, source)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        pytest.main(arguments, plugins=[plugin])
    passed = any(row[0] == "pass" for row in report.tests.values())
    if not report.tests and not report.collection and not proxies.link.influenced:
        report.unusable = report.unusable or f"pytest finds no tests in it: {said.getvalue()[-TEXT:]}"
    elif passed and not proxies.link.influenced:
        report.unusable = report.unusable or "it never asks the candidate anything"


# ---- checkers ----


def run_checker(source):
    """One answer per case, until the judge closes the pipe."""
    linecache.cache["checker.py"] = (len(source), None, source.splitlines(True), "checker.py")
    names = {"__name__": "checker", "__builtins__": builtins}
    try:
        exec(compile(source, "checker.py", "exec", dont_inherit=True), names)
        reply = {"ready": True}
    except BaseException as error:
        reply = {"failed": shown(error, "checker.py")}
    while True:
        harness.send(json.dumps(reply).encode())
        reply = check_case(names["check"], harness.receive()["case"])


def check_case(check, case):
    try:
        arguments = [objects.from_wire(codec.from_json(part), codec.Opaque) for part in case]
    except TypeError as error:
        return {"malformed": str(error)}
    try:
        result = check(*arguments)
    except BaseException as error:
        return {"failed": shown(error, "checker.py")}
    if type(result) is not bool:
        return {"failed": f"it returned {result!r:.100}, not a bool"}
    return {"result": result}


# ---- white-box suites ----


def run_suite():
    """A pytest suite over the candidate as the real module `solution`. Untrusted: all of it is one process.

    {"id", "code", "suite"}; reply {"id", "result": [[[name, outcome, text], ...], complaint]}, or
    {"id", "error": [type, message, traceback]} of what is no Python
    """
    harness.prepare(SUITE_FILE, buffered=False)
    request = harness.receive()
    sys.path.insert(1, TOOLS)
    sys.path.insert(1, "/tmp")
    name = json.dumps(request["id"]).encode()
    try:
        compile(request["code"], "solution.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        harness.send(b'{"id":%s,"error":%s}' % (name, json.dumps(harness.describe(error, "solution.py")).encode()))
        os._exit(1)
    with open("/tmp/solution.py", "w", encoding="utf-8") as stream:
        stream.write(request["code"])
    report = InsideReport()
    run_pytest(request["suite"], report)
    rows = [[name, *row[:2]] for name, row in report.tests.items()]
    complaint = report.missing or report.unusable or "".join(row[1] for row in report.collection[:1])
    harness.send(b'{"id":%s,"result":%s}' % (name, json.dumps([rows, complaint]).encode()))
    os._exit(0)


def collect(source, report):
    """Finds the tests of a suite without running them, with a stand-in for the candidate."""
    from unittest import mock

    sys.modules["solution"] = mock.MagicMock()
    proxies.link.influenced = True
    run_pytest(source, report, "--collect-only")
