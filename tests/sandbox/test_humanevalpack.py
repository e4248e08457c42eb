"""HumanEvalPack: the fixed programs pass and the buggy ones fail, each suite in its candidate's own process.

A candidate is `declaration` and solution, as the dataset means it; its suite is `test`. By default a few rows of
Python, JavaScript and C++; all of them, and samples of the other languages, are `slow`.
"""

import json
import re

import pytest

from rl_posttrain.sandbox.judge import judge_many
from rl_posttrain.sandbox.kinds import WhiteBoxTests
from rl_posttrain.sandbox.languages import LANGUAGES
from rl_posttrain.sandbox.limits import Limits
from rl_posttrain.sandbox.pool import Pool, PoolConfig

ROWS = 164
FILES = {"python": "python", "javascript": "js", "cpp": "cpp", "rust": "rust", "go": "go", "java": "java"}
DERIVED = ("python", "javascript", "cpp")  # whose twins the sandbox makes itself
SAMPLE = {"python": (0, 53, 110), "javascript": (0, 27, 53, 86, 110, 141), "cpp": (0, 86)}
LIMITS = Limits(cpu_seconds=5.0, wall_seconds=60.0)
# Rows that cannot be judged here, and why.
CRATE = "needs a crate that does not come with Rust"
EXCEPTIONS: dict[str, dict[int, str]] = {
    "python": {},
    "javascript": {162: "needs the package js-md5"},
    "cpp": {
        22: "needs Boost",
        38: "its declaration holds the beginning of the function's body, which the solution repeats",
        137: "needs Boost",
        162: "needs OpenSSL, and to be linked with it",
    },
    "rust": dict.fromkeys((32, 38, 50, 53, 91, 162), CRATE),
    "go": {32: "its declaration lacks the function Poly, which the suite calls"},
    "java": {},
}


@pytest.fixture(scope="module")
def pool():
    with Pool(PoolConfig(slots=2, limits=LIMITS)) as pool:
        yield pool


@pytest.fixture(scope="module")
def load(shared):
    """load(language): its rows."""

    def load(language):
        path = shared / "data" / "humanevalpack" / f"{FILES[language]}.jsonl"
        if not path.is_file():
            pytest.skip(f"{path} is not there")
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert len(rows) == ROWS
        return rows

    return load


# ---- from the dataset's rows to candidates and suites ----


def python(row, solution):
    call = f"check({row['entry_point']})"
    suite, _, rest = row["test"].rpartition(call)
    assert not rest.strip()
    suite = f"from solution import *\n{suite}\ndef test_check():\n    {call}\n"
    return row["declaration"] + row[solution], WhiteBoxTests(suite)


def javascript(row, solution):
    return row["declaration"] + row[solution], WhiteBoxTests(row["test"])


cpp = javascript

# Crates that are not part of Rust, which every declaration imports and few solutions use.
CRATES = re.compile(r"use (rand::Rng|regex::Regex|md5);")
RUST_TWIN = """
#[allow(unused_macros)]
macro_rules! assert { ($value:expr $(,)?) => { if $value { panic!("it held") } }; }
#[allow(unused_macros)]
macro_rules! assert_eq { ($left:expr, $right:expr $(,)?) => { if $left == $right { panic!("it held") } }; }
"""


def rust(row, solution):
    code = CRATES.sub("", row["declaration"]) + row[solution]
    suite = row["test"].replace("#[cfg(test)]", "").replace("#[test]", "pub")
    (function,) = re.findall(r"pub\s+fn (\w+)\(\)", suite)
    suite += f"\nfn main() {{ tests::{function}(); }}\n"
    return code, WhiteBoxTests(suite, twin=RUST_TWIN + suite)


GO_SUITE = """
type asserting struct{}

var assert asserting

func (asserting) New(*testing.T) asserting { return assert }
func (asserting) Equal(want, got interface{}, words ...interface{}) {
	if reflect.DeepEqual(want, got) != HOLDS {
		panic("assertion failed")
	}
}
func main() { TEST(nil) }
"""


def go(row, solution):
    # Go wants all imports first and none in vain: those of the suite stand before the candidate.
    wanted = {*re.findall(r'"[^"]+"', row["import"] + row["test_setup"]), '"reflect"'}
    wanted.discard('"github.com/stretchr/testify/assert"')
    body = row["declaration"] + row[solution]
    used = [
        name for name in sorted(wanted) if f"{name.strip(chr(34)).split('/')[-1]}." in body + row["test"] + GO_SUITE
    ]
    code = "package main\nimport (\n" + "\n".join(used) + "\n)\n" + body
    (function,) = re.findall(r"func (Test\w+)\(t \*testing.T\)", row["test"])
    suite = row["test"] + GO_SUITE.replace("TEST", function)
    return code, WhiteBoxTests(suite.replace("HOLDS", "true"), twin=suite.replace("HOLDS", "false"))


def java(row, solution):
    twin = re.sub(r"if \((.*)\) \{(\s*throw new AssertionError)", r"if (!(\1)) {\2", row["test"])
    return row["declaration"] + row[solution], WhiteBoxTests(row["test"], twin=twin)


READ = {"python": python, "javascript": javascript, "cpp": cpp, "rust": rust, "go": go, "java": java}


def judge_rows(pool, load, language, indices):
    """Problems, a line each: fixed programs that do not pass, buggy ones that do."""
    missing = LANGUAGES[language].missing()
    if missing is not None:
        pytest.skip(missing)
    rows = load(language)
    indices = [index for index in indices if index not in EXCEPTIONS[language]]
    problems = []
    for solution in ("canonical_solution", "buggy_solution"):
        items = [READ[language](rows[index], solution) for index in indices]
        for index, verdict in zip(indices, judge_many(pool, items, language=language), strict=True):
            assert verdict.trust == "tamper_evident" and verdict.status != "infra_error"
            right = solution == "canonical_solution"
            if verdict.passed != right or (right and verdict.flags):
                problems.append(
                    f"{rows[index]['task_id']} {solution}: {verdict.status}, {verdict.detail} {verdict.flags}"
                )
    return "\n".join(problems)


@pytest.mark.parametrize("language", DERIVED)
def test_fixed_programs_pass_and_buggy_ones_fail(pool, load, language):
    assert judge_rows(pool, load, language, SAMPLE[language]) == ""


@pytest.mark.slow
@pytest.mark.parametrize("language", FILES)
def test_all_fixed_programs_pass_and_all_buggy_ones_fail(pool, load, language):
    indices = range(ROWS) if language in DERIVED else range(0, ROWS, 8)
    assert judge_rows(pool, load, language, indices) == ""
