"""Twins of white-box suites: the same tests with wrong expectations, which every right program fails.

A program that passes its twin has not done what the tests ask: it has changed what asking means. So a twin
should look like the suite to whoever tampers. Where an assertion is `==`, its expected value becomes a wrong
one, in the literal or in the test's own variable, which also exposes objects that are equal to everything and
programs that look for the expected value; any other assertion is negated.
"""

from __future__ import annotations

import ast
import re

EQUALITIES = (
    "assertEqual assertEquals assertListEqual assertTupleEqual assertDictEqual assertSetEqual assertAlmostEqual"
)
EQUAL_METHODS = frozenset(EQUALITIES.split())
CONTEXTS = frozenset("raises warns assertRaises assertRaisesRegex assertWarns assertLogs".split())

PRELUDE = """
import contextlib as __contextlib__


def __wrong__(value):
    if value is None:
        return 0
    if type(value) is bool:
        return not value
    if type(value) in (int, float, complex):
        return value + 1 + abs(value) if value - value == 0 else 0  # not for infinity and nan
    if type(value) in (str, bytes):
        return value + ("?" if type(value) is str else b"?")
    if type(value) in (list, tuple):
        return value + type(value)([0])
    if type(value) in (set, frozenset):
        return value | {"?"}
    if type(value) is dict:
        return {**value, "?": 0}
    raise AssertionError("no wrong value is known")


def __must_fail__(check, *arguments, **keywords):
    try:
        check(*arguments, **keywords)
    except BaseException:
        return
    raise AssertionError("it held")
"""
PYTHON: dict = {}
exec(PRELUDE, PYTHON)

C_PRELUDE = """
#include <stdlib.h>
#define twin_assert(...) ((__VA_ARGS__) ? abort() : (void)0)
"""
# console.assert only prints, and a program whose assertions failed would end with 0.
JAVASCRIPT_PRELUDE = """
console.assert = (condition, ...words) => {
  if (!condition) throw new Error(`Assertion failed ${words.join(" ")}`);
};
"""
JAVASCRIPT_TWIN = """
console.assert = (condition) => {
  if (condition) throw new Error("it held");
};
globalThis.twinAssert = (() => {
  const mustFail = (check) => (...values) => {
    try {
      check(...values);
    } catch {
      return;
    }
    throw new Error("it held");
  };
  const negated = (all) =>
    new Proxy(all, {
      apply: (target, self, values) => mustFail(target)(...values),
      get: (target, name) => {
        if (name === "strict") return negated(target.strict);
        return typeof target[name] === "function" && name !== "AssertionError" ? mustFail(target[name]) : target[name];
      },
    });
  return negated(require("node:assert"));
})();
"""


def derive(language: str, suite: str) -> str:
    """The twin of a suite.

    Raises:
      ValueError: the suite is not Python, or has tests without an assertion, or the language has no derivation.
    """
    if language == "python":
        return _python(suite)
    if language in ("c", "cpp"):
        twin, count = re.subn(r"\bassert(?=\s*\()", "twin_assert", suite)
        prelude = C_PRELUDE
    elif language == "javascript":
        twin, count = re.subn(r"""\brequire\s*\(\s*(['"])(node:)?assert(/strict)?\1\s*\)""", "twinAssert", suite)
        count += suite.count("console.assert")
        prelude = JAVASCRIPT_TWIN
    else:
        raise ValueError(f"language={language!r} needs an explicit twin: the suite with wrong expectations")
    if not count:
        raise ValueError("the suite has no assertion that could be negated: give WhiteBoxTests.twin")
    return prelude + twin


def prelude(language: str) -> str:
    """What goes before a suite so that its failed assertions end the program with another code than 0."""
    return JAVASCRIPT_PRELUDE if language == "javascript" else ""


# ---- Python ----


def _python(suite: str) -> str:
    try:
        tree = ast.parse(suite)
    except SyntaxError as error:
        raise ValueError(f"the suite is not Python: {error}") from error
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    asserting = {function.name for function in functions if any(map(_is_assertion, ast.walk(function)))}
    while True:  # tests that leave it to a helper
        more = {
            f.name
            for f in functions
            if f.name not in asserting and any(_calls(node, asserting) for node in ast.walk(f))
        }
        if not more:
            break
        asserting |= more
    bare = [
        function.name for function in functions if function.name.startswith("test") and function.name not in asserting
    ]
    if bare or not any(name.startswith("test") for name in asserting):
        raise ValueError(
            f"tests without an assertion have no negation: {bare or 'all of the suite'}; give WhiteBoxTests.twin, the "
            "suite with wrong expectations"
        )
    twin = _Twin({function.name for function in functions}).visit(tree)
    # After what has to stand first.
    first = 0
    for node in twin.body:
        documentation = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not (documentation or (isinstance(node, ast.ImportFrom) and node.module == "__future__")):
            break
        first += 1
    twin.body[first:first] = ast.parse(PRELUDE).body
    return ast.unparse(ast.fix_missing_locations(twin))


def _callee(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _is_assertion(node: ast.AST) -> bool:
    return isinstance(node, ast.Assert) or _callee(node).startswith("assert") or _callee(node) in CONTEXTS


def _calls(node: ast.AST, names: set[str]) -> bool:
    return _callee(node) in names


class _Twin(ast.NodeTransformer):
    """Rewrites every assertion of a module."""

    def __init__(self, defined: set[str]):
        self._defined = defined  # helpers, whose own assertions are rewritten
        self._locals: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        before = self._locals
        arguments = node.args
        self._locals = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        self._locals |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        self.generic_visit(node)
        self._locals = before
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        changed: list[ast.stmt] = []
        node.test = self._negate(node.test, changed)
        return [*changed, node]

    def visit_With(self, node: ast.With) -> ast.AST:
        self.generic_visit(node)
        for item in node.items:
            if _callee(item.context_expr) in CONTEXTS:
                item.context_expr = ast.parse("__contextlib__.nullcontext()", mode="eval").body
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.stmt | list[ast.stmt]:
        call, name = node.value, _callee(node.value)
        if not isinstance(call, ast.Call) or name in self._defined:
            return node
        if name in EQUAL_METHODS and len(call.args) >= 2:
            changed: list[ast.stmt] = []
            call.args[:2] = self._unequal(call.args[0], call.args[1], changed)
            return [*changed, node]
        if name.startswith("assert") or name in CONTEXTS:
            node.value = ast.Call(ast.Name("__must_fail__", ast.Load()), [call.func, *call.args], call.keywords)
        return node

    def _negate(self, test: ast.expr, changed: list[ast.stmt]) -> ast.expr:
        """An expression that is false where `test` is true; `changed` receives statements that go before."""
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            test.values = [self._negate(value, changed) for value in test.values]
            return test
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return test.operand
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
            test.left, test.comparators[0] = self._unequal(test.left, test.comparators[0], changed)
            return test
        return ast.UnaryOp(ast.Not(), test)

    def _unequal(self, left: ast.expr, right: ast.expr, changed: list[ast.stmt]) -> tuple[ast.expr, ast.expr]:
        """Two equal operands as unequal ones: the expected one of them made wrong."""
        for expected in (right, left):
            wrong = _wrong_literal(expected)
            if wrong is not None:
                return (left, wrong) if expected is right else (wrong, right)
        if _callee(right) == "approx" and isinstance(right, ast.Call) and right.args:
            right.args[0] = _wrong_literal(right.args[0]) or _wrong(right.args[0])
            return left, right
        if isinstance(right, ast.Name) and right.id in self._locals:
            # In the variable, for whoever looks for it there.
            statement = ast.Assign([ast.Name(right.id, ast.Store())], _wrong(ast.Name(right.id, ast.Load())))
            changed.append(ast.copy_location(statement, right))
            return left, right
        return left, _wrong(right)


def _wrong(node: ast.expr) -> ast.expr:
    return ast.Call(ast.Name("__wrong__", ast.Load()), [node], [])


def _wrong_literal(node: ast.expr) -> ast.expr | None:
    try:
        text = repr(PYTHON["__wrong__"](ast.literal_eval(node)))
        return ast.parse(text, mode="eval").body if text == repr(ast.literal_eval(text)) else None
    except (ValueError, TypeError, SyntaxError, AssertionError, RecursionError):
        return None
