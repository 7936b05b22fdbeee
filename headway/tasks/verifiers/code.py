"""Does the program in the text pass the row's tests? It runs in a sandbox that is used once (`headway.tasks.sandbox`).

Three kinds of rows, recognised by their fields, each as data sets have them:

- `test_list`, single asserts, with an optional `test_setup_code`;
- `test`, a suite: functions named test_…, unittest's cases, plain asserts, or `check(candidate)` with `entry_point`;
- `cases`, a list of {"input", "output"}, or the two lists `inputs` and `outputs`: standard input to standard output,
  compared line by line without trailing spaces and blank lines at the end.

The program is the last fenced block that defines what the tests call, or the last block, or the whole text.

1.0: every test passed. 0.0: any failed, or the program crashed, ended itself, exceeded a limit, attacked the sandbox or
is no Python. An error: the sandbox could not be started or closed. Tests run in a process of their own, where names of
the program stand for calls into its process, so that a program can only pass by giving values that pass. A row whose
tests do not compile or test nothing is refused at start. `verify_share` gives the share of the tests passed instead;
`CodeVerifier(Limits(...))` makes a verifier with limits of your own; `verify_without_isolation` needs no namespaces,
and is for code you trust.
"""

import ast
import builtins
import json
import re
import sys
import threading
from contextlib import suppress
from functools import lru_cache

from headway.tasks.sandbox.pool import Limits, Outcome, ProgramRun, Sandboxes, Tests
from headway.tasks.verifiers import Row

_FENCE = re.compile(  # a block may begin within a line; ```code``` on one line is none
    r"```[^`\n]+```|(?:^([ \t]+))?```[ \t]*([\w+-]*)[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE
)
_PYTHON = ("", "python", "python3", "py")


class CodeVerifier:
    """A verifier of programs; one pool of sandboxes a process, made when first needed."""

    needs: tuple[str, ...] = ()

    def __init__(
        self, limits: Limits | None = None, isolated: bool = True, share: bool = False, spares: int = 2
    ) -> None:
        self._limits, self._isolated, self._share, self._spares = limits or Limits(), isolated, share, spares
        self._lock = threading.Lock()
        self._sandboxes: Sandboxes | None = None

    def __call__(self, row: Row, text: str) -> float:
        outcome = self.outcome(row, text)
        right = outcome.passed == outcome.total
        return outcome.passed / outcome.total if self._share else float(right)

    def outcome(self, row: Row, text: str) -> Outcome:
        """How many tests passed, and the first failure in words: feedback for a next attempt."""
        if reason := self.check_row(row):
            raise ValueError(reason)
        if cases := _cases(row):
            return self._run_cases(find_program(text), cases)
        tests = _tests(row)
        return self.warm_up().test(_complete(row, find_program(text, tuple(tests.names))), tests)

    def check_row(self, row: Row) -> str:
        """Why no program could be tried with this row; "" when one can."""
        try:
            if not _cases(row):
                _tests(row)
        except (ValueError, SyntaxError, TypeError) as error:
            return f"its tests cannot be used: {error}"
        return ""

    def warm_up(self) -> Sandboxes:
        with self._lock:
            if self._sandboxes is None:
                self._sandboxes = Sandboxes(self._limits, self._spares, self._isolated)
            return self._sandboxes

    def close(self) -> None:
        with self._lock:
            if self._sandboxes is not None:
                self._sandboxes.close()
            self._sandboxes = None

    def _run_cases(self, program: str, cases: list[tuple[str, str]]) -> Outcome:
        runs = self.warm_up().run(program, [given for given, _ in cases], stop_at_error=not self._share)
        passed, failure = 0, "" if runs else f"ran longer than {self._limits.wall_s:g} s, or ended its sandbox"
        for number, (run, (_, expected)) in enumerate(zip(runs, cases, strict=False), start=1):
            same = lines_of(run.output.decode("utf-8", "replace")) == lines_of(expected)
            right = same and run.status == 0 and not run.too_long
            passed += right
            if not right and not failure:
                how = _how_it_ended(run)
                failure = f"input {number}: {how} {run.errors[-500:]}".strip()
        return Outcome(passed, len(cases), failure)


def _how_it_ended(run: ProgramRun) -> str:
    if run.too_long:
        return "printed too much"
    return f"ended with {run.status}" if run.status else "wrong output"


def find_program(text: str, names: tuple[str, ...] = ()) -> str:
    """The last fenced block that defines one of the names, or the last one, or the whole text."""
    fenced = [match.groups() for match in _FENCE.finditer(text) if match[3] is not None]
    blocks = [
        re.sub(f"^{indent}", "", body, flags=re.MULTILINE) if indent else body  # as far as its fence is indented
        for indent, language, body in fenced
        if language.lower() in _PYTHON
    ]
    if not blocks:
        return text
    any_name = "|".join(map(re.escape, names)) or "(?!)"
    wanted = re.compile(rf"^\s*(?:async\s+def|def|class)\s+(?:{any_name})\b", re.MULTILINE)
    best: str = next((body for body in reversed(blocks) if wanted.search(body)), blocks[-1])
    return best


def lines_of(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _complete(row: Row, program: str) -> str:
    """Where a row's prompt is the beginning of the program (imports, helpers, a signature), put it in front."""
    prompt, name = row.get("prompt"), row.get("entry_point")
    if not isinstance(prompt, str) or not name or f"def {name}" not in prompt:
        return program
    if f"def {name}" not in program:
        return prompt + program
    before = prompt[: prompt.rindex(f"def {name}")]
    return f"{before}\n{program}" if _compiles(before) else program


def _compiles(source: str) -> bool:
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        ast.parse(source)
        return True
    return False


def _cases(row: Row) -> list[tuple[str, str]]:
    if "cases" in row:
        pairs = [(case["input"], case["output"]) for case in row["cases"]]
    elif "inputs" in row and "outputs" in row:
        if len(row["inputs"]) != len(row["outputs"]):
            raise ValueError(f"it has {len(row['inputs'])} inputs and {len(row['outputs'])} outputs")
        pairs = list(zip(row["inputs"], row["outputs"], strict=True))
    else:
        return []
    if not pairs or not all(isinstance(text, str) for pair in pairs for text in pair):
        raise ValueError("cases are pairs of an input and an output, both text, and at least one pair")
    return pairs


def _tests(row: Row) -> Tests:
    if "test_list" not in row and "test" not in row:
        raise ValueError("it has none of the fields test_list, test, cases, or inputs and outputs")
    asserts, suite = row.get("test_list", []), row.get("test", "")
    if not isinstance(suite, str) or not all(isinstance(text, str) for text in asserts):
        raise ValueError("tests are text")
    return _analyse(json.dumps([asserts, suite, row.get("test_setup_code") or "", row.get("entry_point") or ""]))


@lru_cache(maxsize=4096)
def _analyse(fields: str) -> Tests:
    """Which names the tests take from the program. Raises for tests that do not compile or that test nothing."""
    asserts, suite, setup, entry_point = json.loads(fields)
    trees = [ast.parse(source) for source in (*asserts, suite, setup)]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    if not any(isinstance(node, ast.Assert) or _is_assertion(node) for node in nodes):
        raise ValueError("there is no assertion in them")
    own = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    own |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    own |= {alias.asname or alias.name.split(".")[0] for node in nodes for alias in _imported(node)}
    read = {node.id for node in nodes if isinstance(node, ast.Name)} - own
    bases = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    modules = {name for name in read & bases if name in sys.stdlib_module_names}
    names = {name for name in read - modules if name not in vars(builtins)}
    from_program = [node for node in nodes if isinstance(node, ast.ImportFrom) and _of_program(node)]
    names |= {alias.name for node in from_program for alias in node.names}
    if entry_point:
        names.add(entry_point)
    if not names:
        # Tests of nothing but built-in names: the program's own `sum` or `pow` is what is tried. Otherwise a built-in
        # is the real one, whatever the program calls so.
        called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        names = called & read
    return Tests(tuple(asserts), suite, setup, entry_point, tuple(sorted(names)), tuple(sorted(modules)))


def _is_assertion(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr.startswith("assert")


def _imported(node: ast.AST) -> list[ast.alias]:
    if isinstance(node, ast.ImportFrom) and _of_program(node):
        return []
    return node.names if isinstance(node, ast.Import | ast.ImportFrom) else []


def _of_program(node: ast.ImportFrom) -> bool:
    return node.module == "solution"


verify = CodeVerifier()
verify_share = CodeVerifier(share=True)
verify_without_isolation = CodeVerifier(isolated=False)
