"""Twins of white-box suites: the same tests with wrong expectations, which every right program fails.

A program that passes its twin has not done what the tests ask: it has changed what asking means. So a twin
should look like the suite to whoever tampers. Where an assertion is `==`, its expected value becomes a wrong
one, in the literal or in the test's own variable, which also exposes objects that are equal to everything and
programs that look for the expected value; any other assertion is negated. A twin's test passes as soon as one
of its wrong expectations holds, so that being right elsewhere hides nothing.
"""

from __future__ import annotations

import ast
import re

EQUALITIES = (
    "assertEqual assertEquals assertListEqual assertTupleEqual assertDictEqual assertSetEqual assertAlmostEqual"
)
EQUAL_METHODS = frozenset(EQUALITIES.split())
OPPOSITES = {
    "assertTrue": "assertFalse",
    "assertIn": "assertNotIn",
    "assertIs": "assertIsNot",
    "assertIsNone": "assertIsNotNone",
    "assertIsInstance": "assertNotIsInstance",
    "assertNotEqual": "assertEqual",
}
OPPOSITES |= {value: key for key, value in OPPOSITES.items()}
RAISES = frozenset("raises assertRaises assertRaisesRegex".split())

PRELUDE = """
__held__ = []


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

# Not the library's assert, which a program can switch off, or replace what it ends with. The suite and its twin
# end by the same instruction: who survives one survives the other.
C_SUITE = """
#include <stdio.h>
#define suite_assert(...) \\
  ((__VA_ARGS__) ? (void)0 : (fprintf(stderr, "assertion failed: %s\\n", #__VA_ARGS__), __builtin_trap()))
"""
C_TWIN = """
#define suite_assert(...) ((__VA_ARGS__) ? __builtin_trap() : (void)0)
"""
# console.assert only prints, and a program whose assertions failed would end with 0.
JAVASCRIPT_SUITE = """
console.assert = (condition, ...words) => {
  if (!condition) throw new Error(`Assertion failed ${words.join(" ")}`);
};
"""
JAVASCRIPT_TWIN = """
globalThis.__twin = (() => {
  const mustHold = (check) => {
    try {
      check();
    } catch {
      return;
    }
    process.exit(0);
  };
  const wrong = (value) => (typeof value === "number" ? value + 1 + Math.abs(value) : [value, "wrong"]);
  const negated = (all) =>
    new Proxy(all, {
      apply: (target, self, [value]) => mustHold(() => target(!value)),
      get: (target, name) => {
        const check = target[name];
        if (name === "strict") return negated(check);
        if (typeof check !== "function" || name === "AssertionError") return check;
        if (name === "ok") return (value) => mustHold(() => check(!value));
        if (/^(deep|strict)*equal$/i.test(name)) return (got, want) => mustHold(() => check(got, wrong(want)));
        if (name === "throws") return (f) => mustHold(() => target.doesNotThrow(f));
        return (...values) => mustHold(() => target.throws(() => check(...values)));
      },
    });
  const ended = (condition) => mustHold(() => console.assert(!condition));
  return { assert: negated(require("node:assert")), consoleAssert: ended };
})();
process.on("beforeExit", () => {
  throw new Error("no wrong expectation held");
});
"""
JAVASCRIPT_ASSERT = re.compile(r"""\brequire\s*\(\s*(['"])(node:)?assert(/strict)?\1\s*\)""")
C_ASSERT = re.compile(r"\bassert(?=\s*\()")


def derive(language: str, suite: str) -> str:
    """The twin of a suite.

    Raises:
      ValueError: the suite is not Python, or has tests without an assertion, or the language has no derivation.
    """
    if language == "python":
        return _python(suite)
    if language in ("c", "cpp"):
        twin, count = C_ASSERT.subn("suite_assert", suite)
        start = C_TWIN
    elif language == "javascript":
        twin, count = JAVASCRIPT_ASSERT.subn("__twin.assert", suite)
        count += twin.count("console.assert")
        twin = twin.replace("console.assert", "__twin.consoleAssert")
        start = JAVASCRIPT_SUITE + JAVASCRIPT_TWIN
    else:
        raise ValueError(f"language={language!r} needs an explicit twin: the suite with wrong expectations")
    if not count:
        raise ValueError("the suite has no assertion that could be negated: give WhiteBoxTests.twin")
    return start + twin


def armed(language: str, suite: str) -> str:
    """A suite whose failed assertions end the program with another code than 0."""
    if language in ("c", "cpp"):
        return C_SUITE + C_ASSERT.sub("suite_assert", suite)
    return JAVASCRIPT_SUITE + suite if language == "javascript" else suite


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
    tests = [function.name for function in functions if is_test(function)]
    bare = [name for name in tests if name not in asserting]
    if bare or not tests:
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


def is_test(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether pytest takes the function for a test."""
    fixture = any("fixture" in ast.unparse(decorator) for decorator in function.decorator_list)
    return function.name.startswith("test") and not fixture


def callee(node: ast.AST) -> str:
    """The last name of what a call calls; "" for other nodes."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _asserts(name: str) -> bool:
    return name.startswith("assert") and name not in ("assertWarns", "assertLogs", "assertNoLogs")


def _is_assertion(node: ast.AST) -> bool:
    return isinstance(node, ast.Assert) or callee(node) in RAISES or _asserts(callee(node))


def _calls(node: ast.AST, names: set[str]) -> bool:
    return callee(node) in names


class _Twin(ast.NodeTransformer):
    """Rewrites every assertion of a module."""

    def __init__(self, defined: set[str]):
        self._defined = defined  # helpers, whose own assertions are rewritten
        self._locals: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """A test passes, whatever else happens in it, when one of its expectations held."""
        before = self._locals
        arguments = node.args
        self._locals = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        self._locals |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        self.generic_visit(node)
        self._locals = before
        if is_test(node):
            start, end = (
                ast.parse("__before__ = len(__held__)").body,
                ast.parse("assert len(__held__) > __before__").body,
            )
            node.body = [*start, ast.Try(node.body, [_ignore()], [], end)]
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        names: set[str] = set()
        node.test = self._negate(node.test, names)
        return _attempt(node, names)

    def visit_With(self, node: ast.With) -> ast.AST:
        self.generic_visit(node)
        if len(node.items) == 1 and callee(node.items[0].context_expr) in RAISES:
            return ast.Try(node.body, [_ignore()], HELD, [])
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        call, name = node.value, callee(node.value)
        if not isinstance(call, ast.Call) or name in self._defined or not _is_assertion(call):
            return node
        names: set[str] = set()
        if name in EQUAL_METHODS and len(call.args) >= 2:
            call.args[:2] = self._unequal(call.args[0], call.args[1], names)
        elif name in OPPOSITES and isinstance(call.func, ast.Attribute):
            call.func.attr = OPPOSITES[name]
        else:
            node.value = ast.Call(ast.Name("__must_fail__", ast.Load()), [call.func, *call.args], call.keywords)
        return _attempt(node, names)

    def _negate(self, test: ast.expr, names: set[str]) -> ast.expr:
        """An expression that is false where `test` is true; `names` receives variables to make wrong before."""
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            test.values = [self._negate(value, names) for value in test.values]
            return test
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return test.operand
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
            test.left, test.comparators[0] = self._unequal(test.left, test.comparators[0], names)
            return test
        return ast.UnaryOp(ast.Not(), test)

    def _unequal(self, left: ast.expr, right: ast.expr, names: set[str]) -> tuple[ast.expr, ast.expr]:
        """Two equal operands as unequal ones: the expected one of them made wrong."""
        for expected in (right, left):
            wrong = wrong_literal(expected)
            if wrong is not None:
                return (left, wrong) if expected is right else (wrong, right)
        if callee(right) == "approx" and isinstance(right, ast.Call) and right.args:
            right.args[0] = wrong_literal(right.args[0]) or _wrong(right.args[0])
            return left, right
        if isinstance(right, ast.Name) and right.id in self._locals:
            names.add(right.id)  # in the variable, for whoever looks for it there
            return left, right
        return left, _wrong(right)


HELD = ast.parse("__held__.append(1)").body


def _ignore() -> ast.ExceptHandler:
    return ast.ExceptHandler(ast.Name("BaseException", ast.Load()), None, [ast.Pass()])


def _attempt(statement: ast.stmt, names: set[str]) -> ast.stmt:
    """Notes whether the changed `statement` holds, with the variables `names` made wrong meanwhile."""
    before = [ast.parse(f"__saved_{name}__ = {name}\n{name} = __wrong__({name})").body for name in sorted(names)]
    after = [ast.parse(f"{name} = __saved_{name}__").body for name in sorted(names)]
    attempt = ast.Try([*sum((lines[1:] for lines in before), []), statement], [_ignore()], HELD, sum(after, []))
    if not names:
        return attempt
    # One statement, in which what is saved is always there.
    return ast.If(ast.Constant(True), [*(lines[0] for lines in before), attempt], [])


def _wrong(node: ast.expr) -> ast.expr:
    return ast.Call(ast.Name("__wrong__", ast.Load()), [node], [])


def wrong_literal(node: ast.expr) -> ast.expr | None:
    """Another value than that of a literal, as a literal; None for what is none, or has no such value."""
    try:
        text = repr(PYTHON["__wrong__"](ast.literal_eval(node)))
        return ast.parse(text, mode="eval").body if text == repr(ast.literal_eval(text)) else None
    except (ValueError, TypeError, SyntaxError, AssertionError, RecursionError):
        return None
