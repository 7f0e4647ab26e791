"""The list of mutants keeps up with the code, and the verdict on a mutant is right."""

import ast
import functools
from collections import Counter

import pytest

from benchmarks import mutants
from benchmarks.mutants import BROKEN, KILLED, ROOT, STALE, SURVIVED, Mutant, judge, read_list

MUTANTS = read_list()


@functools.cache
def text_of(file):
    path = ROOT / file
    return path.read_text() if path.is_file() else ""


@functools.cache
def names_in(file):
    found = ast.walk(ast.parse(text_of(file)))
    return {one.name for one in found if isinstance(one, ast.FunctionDef)}


def test_each_line_is_there_once_and_stays_python():
    files = {mutant.file for mutant in MUTANTS}
    meaning = {file: ast.dump(ast.parse(text_of(file))) for file in files}
    stale = [one for one in MUTANTS if one.text(text_of(one.file)) is None]
    assert not stale, stale
    for one in MUTANTS:
        assert ast.dump(ast.parse(one.text(text_of(one.file)))) != meaning[one.file], one


def test_the_tests_are_there():
    for name in sorted({name for mutant in MUTANTS for name in mutant.tests}):
        file, *functions = name.split("::")
        assert names_in(file), f"{file} is missing"
        assert {one.partition("[")[0] for one in functions} <= names_in(file), name


def test_there_are_enough_and_none_twice():
    assert len(MUTANTS) >= 300
    changes = Counter((mutant.file, mutant.text(text_of(mutant.file))) for mutant in MUTANTS)
    assert not [change for change, count in changes.items() if count > 1]


@pytest.mark.parametrize(
    ("before", "code", "fate"),
    [
        ("a < b", 1, KILLED),
        ("a < b", None, KILLED),  # it runs on and on
        ("a < b", 0, SURVIVED),
        ("a < b", 2, STALE),  # no Python any more: that shows nothing
        ("a < b", 4, STALE),  # no such test
        ("a > b", 1, STALE),
        ("a", 1, STALE),  # more than once there
    ],
)
def test_a_fate_is_that_of_its_tests(before, code, fate, tmp_path, monkeypatch):
    path, source = tmp_path / "module.py", "def less(a, b):\n    return a < b\n"
    path.write_text(source)
    path_time, seen = path.stat().st_mtime_ns, []

    def run_tests(folder, tests, *, seconds):
        seen.append((folder, tests, path.read_text()))
        assert path.stat().st_mtime_ns != path_time, "Python would take the compiled file"
        return code, ""

    monkeypatch.setattr(mutants, "run_tests", run_tests)
    mutant = Mutant(1, "module.py", before, "a <= b", ("tests/test_module.py",))
    assert judge(tmp_path, mutant, usual=1.0)[0] == fate
    changed = source.replace("a < b", "a <= b")
    is_run = before == "a < b"
    assert seen == ([(tmp_path, mutant.tests, changed)] if is_run else [])
    assert (path.read_text(), path.stat().st_mtime_ns) == (source, path_time)


def test_tests_that_fail_by_themselves_kill_nothing(tmp_path):
    mutant = Mutant(1, "module.py", "a", "b", ("tests/test_module.py",))
    assert judge(tmp_path, mutant, usual=None)[0] == BROKEN
