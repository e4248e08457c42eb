"""Twins of Python suites that nobody can tell from the suite who does not know the right answers.

`twins.py` looks at every assertion, and its twins show what they are. Here a twin is the suite with one literal
changed in every test: the expected value of one `==`, at random, in the assertion or in its parametrisation.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator

from rl_posttrain.sandbox.twins import EQUAL_METHODS, callee, is_test, wrong_literal

Function = ast.FunctionDef | ast.AsyncFunctionDef


def plain(suite: str) -> str:
    """The suite as `disguise` writes it, with nothing changed."""
    return ast.unparse(ast.parse(suite))


def disguise(suite: str, seed: int) -> tuple[str, frozenset[str]]:
    """A twin, and the tests that a right program fails in it ("test_x", "TestX::test_x"): the others are unchanged."""
    tree = ast.parse(suite)
    draw = random.Random(seed)
    changed = set()
    for name, function in _tests(tree):
        changes = list(_changes(function))
        if changes:
            draw.choice(changes)()
            changed.add(name)
    return ast.unparse(tree), frozenset(changed)


def _tests(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    for node in tree.body:
        if isinstance(node, Function) and is_test(node):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, Function) and is_test(each):
                    yield f"{node.name}::{each.name}", each


def _changes(function: Function) -> Iterator[Callable[[], None]]:
    """The ways to make one expectation wrong that a right program is sure to reach."""
    if any(isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)) for node in ast.walk(function)):
        return
    for statement in function.body:
        if isinstance(statement, ast.Assert):
            for compare in _conjuncts(statement.test):
                if isinstance(compare, ast.Compare) and len(compare.ops) == 1 and isinstance(compare.ops[0], ast.Eq):
                    yield from _operand_changes(function, compare.comparators, 0, compare.left)
        elif isinstance(statement, ast.Expr) and callee(statement.value) in EQUAL_METHODS:
            call = statement.value
            if isinstance(call, ast.Call) and len(call.args) >= 2:
                yield from _operand_changes(function, call.args, 1, call.args[0])


def _conjuncts(test: ast.expr) -> list[ast.expr]:
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return [part for value in test.values for part in _conjuncts(value)]
    return [test]


def _operand_changes(
    function: Function, operands: list[ast.expr], index: int, other: ast.expr
) -> Iterator[Callable[[], None]]:
    expected = operands[index]
    wrong = wrong_literal(expected)
    if wrong is not None:
        yield lambda: operands.__setitem__(index, wrong)
    elif isinstance(expected, ast.Name):
        cells = _cells(function, expected.id)
        if cells:
            yield lambda: _spoil(cells)
    elif isinstance(other, ast.Constant) and isinstance(other.value, (str, int, float)):
        spoilt = wrong_literal(other)
        if isinstance(spoilt, ast.Constant):
            yield lambda: setattr(other, "value", spoilt.value)


def _cells(function: Function, name: str) -> list[tuple[list[ast.expr], int]]:
    """Where the parametrisation holds the values of the parameter `name`, if the test uses it once, to compare."""
    uses = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name]
    if len(uses) != 1:
        return []
    for decorator in function.decorator_list:
        if not (isinstance(decorator, ast.Call) and callee(decorator) == "parametrize" and len(decorator.args) == 2):
            continue
        names, rows = decorator.args
        try:
            names = ast.literal_eval(names)
        except ValueError:
            continue
        names = [each.strip() for each in names.split(",")] if isinstance(names, str) else list(names)
        if name not in names or not isinstance(rows, (ast.List, ast.Tuple)):
            continue
        column = names.index(name)
        if len(names) == 1:
            cells = [(rows.elts, row) for row in range(len(rows.elts))]
        else:
            cells = [(row.elts, column) for row in rows.elts if isinstance(row, (ast.List, ast.Tuple))]
        whole = len(cells) == len(rows.elts) and all(len(elements) > at for elements, at in cells)
        return cells if whole and all(wrong_literal(elements[at]) for elements, at in cells) else []
    return []


def _spoil(cells: list[tuple[list[ast.expr], int]]) -> None:
    for elements, at in cells:
        wrong = wrong_literal(elements[at])
        assert wrong is not None  # `_cells` has looked
        elements[at] = wrong
