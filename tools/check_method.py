"""Runs all that a method must pass, for one method: its own tests, the shared ones, lint and types.

make check-method M=fedavg
"""

import re
import subprocess
import sys
from pathlib import Path

import readme
from hyperfed.methods import METHODS

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests" / "methods"
PARAMETER = re.compile(r'parametrize\([^\[]*"method"')


def own_tests(method: str) -> list[Path]:
    """Returns the files of tests that hold a method to its paper.

    They are ``test_METHOD.py``, those of the folder ``METHOD/``, and those whose first line has the
    name that its docstring begins with: a family may share a file, or a folder.
    """
    name = re.escape(readme.parts(method)["name"])
    says = re.compile(rf'"""(.*[^\w-])?{name}(?![\w-])')
    return [
        path
        for path in sorted(TESTS.rglob("test_*.py"))
        if path.name == f"test_{method}.py"
        or path.parent == TESTS / method
        or says.match(path.read_text(encoding="utf-8"))
    ]


def shared_tests() -> list[Path]:
    """Returns the files with tests of several methods, of which ``method`` is a parameter."""
    return [
        path
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if PARAMETER.search(path.read_text(encoding="utf-8"))
    ]


def problem(method: str) -> str | None:
    """Returns what must be done before there is anything to run."""
    if method not in METHODS:
        return (
            f"M must be a method of METHODS in src/hyperfed/methods/__init__.py, came {method!r}; "
            f"add it there, or take one of {', '.join(METHODS)}"
        )
    try:
        there = own_tests(method)
    except ValueError as error:
        return str(error)
    if not there:
        return f"{method} must have tests of its own; write tests/methods/test_{method}.py"
    text = readme.README.read_text(encoding="utf-8")
    return None if readme.written(text) == text else "README.md lists other methods; make readme"


def commands(method: str) -> list[list[str]]:
    """Returns what to run, in this order."""
    here = Path(sys.executable).parent
    spread = ["-n", "logical", "--maxprocesses", "8", "--dist", "loadgroup"]
    files = [str(path.relative_to(ROOT)) for path in {*own_tests(method), *shared_tests()}]
    return [
        [str(here / "ruff"), "check", "."],
        [str(here / "ruff"), "format", "--check", "."],
        [str(here / "mypy")],
        [str(here / "lint-imports"), "--no-logo", "--no-cache"],
        [sys.executable, "-m", "pytest", "-v", *spread, "--method", method, *sorted(files)],
    ]


def main(method: str) -> str | None:
    """Runs everything, whatever fails; returns what did."""
    if (wrong := problem(method)) is not None:
        return wrong
    failed = []
    for command in commands(method):
        words = " ".join([Path(command[0]).name, *command[1:]])
        print(f"$ {words}", flush=True)
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(words)
    return "\n".join(["failed:", *failed]) if failed else None


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
