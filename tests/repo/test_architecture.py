"""The shape of the code: which room may import which, how large rooms, files and functions may get, and where each
invariant is written and tested.

Growth is a decision: a room over its budget changes `ROOMS`, a file or function over its ceiling goes into `TOO_LONG`,
with the reason.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from headway.config import all_keys

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "headway"

ROOMS: list[tuple[str, int]] = [
    # The modules and rooms of one level, and the most lines of Python they may have together. A module imports only
    # from levels above its own in this list, and from its own room.
    ("errors codec files trained_tokens types knobs section algorithm contradictions config starter", 2070),
    ("runtime", 1935),
    ("record", 1905),
    ("model", 1060),
    ("weights", 1230),
    ("tasks", 3925),
    ("monitor", 3710),
    ("engine", 5210),
    ("training", 2982),
    ("rollout", 2822),
    ("control", 3067),
    ("launch", 460),
    ("plan", 150),
    ("api", 250),
    ("cli", 440),
]

MONITOR_READS = {
    *("record", "errors", "codec", "files", "trained_tokens", "types"),
    *("knobs", "section", "algorithm", "contradictions", "config"),
}
"""All that `monitor` may import: what is displayed comes from the record."""

ENGINES = ("engine.protocol", "engine.embedded.service", "engine.vllm.engine", "engine.fake")
WORKERS = (
    *ENGINES,
    *("training.trainer", "training.ranks", "training.sft"),
    *("rollout.worker", "rollout.reward_pool", "rollout.reward_process"),
)
BOSSES = ("control", "launch", "plan", "api", "cli")

NEVER_TORCH = """
    errors codec files trained_tokens types knobs section algorithm contradictions config starter
    runtime runtime.process_tree
    record.events record.log record.phases
    record.stats record.shards record.run record.tokens
    record.clock record.health record.steps monitor.metrics monitor.plot monitor.rates monitor.reader
    monitor.listing monitor.export monitor.text monitor.view monitor.report monitor.scaling tasks.imports tasks.prompts
    tasks.datasets
    tasks.verifiers tasks.scoring rollout.workflows rollout.reward_pool rollout.reward_process rollout.router
    rollout.worker
    rollout.response_check rollout.evaluate control.staleness control.buffer control.resize control.health
    training.packing training.algorithms.advantages training.algorithms.credit
    weights.probe weights.stream weights.files engine.protocol
    engine.completion model.tokenizer model.memory model.shape api cli
"""
"""Modules that can be imported where torch is not: what runs in the controller, the reward pool and the viewer."""

TOO_LONG: dict[str, str] = {}
"""Exceptions to the ceilings: "path" or "path:function" to the reason. None so far."""

FILE_LINES, FUNCTION_LINES, NUM_KNOBS = 500, 80, 130
TRIES_PER_THOUSAND_LINES = 6

NOT_OUR_WORDS = {
    # What to write instead is in docs/glossary.md.
    *("befell", "obituary", "whoever", "spoilt", "shunned", "last words", "left no word", "under way", "so many"),
    *("beside", "two looks", "next life", "earlier life", "a life"),
    *("sign of life", "is told", "are told", "was told", "were told", "taken up the wish", "take up the wish"),
}

INVARIANTS = {
    1: "Single admission authority",
    2: "Conservation",
    3: "The engine stamps versions",
    4: "η = 0 is synchronous training",
    5: "Interruption is transparent",
    6: "Parity",
    7: "The loss is Eq. 5",
    8: "Group identity",
    9: "Explicit stop reasons travel",
    10: "Errors are never rewards",
    11: "Verified weight sync",
    12: "Packing-independent gradient",
    13: "Non-blocking generation",
    14: "Crash safety",
    15: "Bounded waits",
    16: "Replay",
}


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def module_name(path: Path) -> str:
    """The dotted name below the package: engine.embedded.core."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in sources("headway")}


def imports(path: Path) -> Iterator[str]:
    """Every imported name in the file, wherever the import stands; `from a import b` gives a.b."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import; write the whole name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_modules(path: Path) -> set[str]:
    """The modules of the package that a file imports, by dotted name below the package."""
    found = set()
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "headway":
            continue
        while parts and ".".join(parts[1:]) not in MODULES:
            parts.pop()
        found.add(".".join(parts[1:]))
    return found - {""}


def imported_roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


def room(module: str) -> str:
    """The folder, or the single module, directly below the package."""
    return module.split(".")[0]


def level(module: str) -> int:
    return next(index for index, (names, _) in enumerate(ROOMS) if room(module) in names.split())


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


@cache
def reached(module: str) -> frozenset[str]:
    """The modules a module imports, directly or by way of others."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        for name in imported_modules(MODULES[waiting.pop()]) - found:
            found.add(name)
            waiting.append(name)
    return frozenset(found)


# Who may import whom


def test_the_listing_of_the_package_is_the_list_of_rooms() -> None:
    listed = {name for names, _ in ROOMS for name in names.split()}
    assert {room(module) for module in MODULES if module} == listed


def test_rooms_import_only_from_rooms_above_them_in_the_list() -> None:
    wrong = []
    for module, path in MODULES.items():
        for other in imported_modules(path) if module else ():  # the package itself names its API, lazily
            same = room(module) == room(other)
            if not same and level(other) > level(module):
                wrong.append(f"{module} imports {other}")
            if room(module) == "monitor" and not same and room(other) not in MONITOR_READS:
                wrong.append(f"{module} imports {other}, and monitor reads the record only")
    assert not wrong


def test_no_module_imports_itself_by_way_of_others() -> None:
    loops = [module for module in MODULES if module in reached(module)]
    assert not loops, f"these modules are part of an import cycle, imports inside functions included: {loops}"


@pytest.mark.parametrize(("names", "budget"), ROOMS)
def test_rooms_stay_within_their_budgets(names: str, budget: int) -> None:
    paths = [path for module, path in MODULES.items() if module and room(module) in names.split()]
    num_lines = sum(len(path.read_text().splitlines()) for path in paths)
    assert num_lines <= budget, f"{names} has {num_lines} lines: delete something, or decide on a larger budget"


def test_the_runtime_knows_nothing_of_rl() -> None:
    for module in MODULES:
        if room(module) == "runtime":
            strangers = {other for other in reached(module) if room(other) != "runtime"} - {"codec", "errors"}
            assert not strangers, f"{module} reaches {strangers}"


@pytest.mark.parametrize("worker", WORKERS)
def test_workers_do_not_know_their_boss(worker: str) -> None:
    assert not {room(module) for module in reached(worker)} & set(BOSSES)


def test_ray_and_vllm_are_imported_only_where_that_back_end_lives() -> None:
    for module, path in MODULES.items():
        assert "ray" not in imported_roots(path) or room(module) == "runtime", f"{module} imports Ray"
        assert "vllm" not in imported_roots(path), f"{module} imports vLLM; call its server instead"


def test_user_code_is_loaded_by_rollout_workers_reward_workers_and_the_reader_of_rows_only() -> None:
    loaders = {module for module, path in MODULES.items() if "tasks.imports" in imported_modules(path)}
    assert loaders == {
        "rollout.worker",
        "rollout.workflows.tools",
        "rollout.workflows.agent",
        "rollout.workflows.environment",
        "tasks.scoring",
        "tasks.datasets",
    }
    for module in ("engine.embedded.service", "training.trainer"):
        assert not {name for name in reached(module) if room(name) in ("tasks", "rollout")}


def test_importing_headway_and_its_light_modules_needs_no_torch_ray_or_vllm() -> None:
    names = ["headway", *(f"headway.{name}" for name in NEVER_TORCH.split())]
    program = (
        "import importlib, sys\n"
        "for heavy in ('torch', 'transformers', 'ray', 'vllm', 'matplotlib', 'tensorboard', 'wandb'):\n"
        "    sys.modules[heavy] = None\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# How long things may get, and what they are called


@pytest.mark.parametrize(
    "path", sources("headway", "bench", "examples", "tests", "docs"), ids=lambda p: str(p.relative_to(ROOT))
)
def test_files_and_functions_stay_below_their_ceilings(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    num_lines = len(path.read_text().splitlines())
    assert num_lines <= FILE_LINES or name in TOO_LONG, f"{name} has {num_lines} lines"
    for function, length in functions(path):
        assert length <= FUNCTION_LINES or f"{name}:{function}" in TOO_LONG, f"{name}:{function} has {length} lines"


def test_errors_are_caught_only_where_that_is_a_decision() -> None:
    num_tries = sum(isinstance(node, ast.Try) for path in MODULES.values() for node in ast.walk(tree(path)))
    num_lines = sum(len(path.read_text().splitlines()) for path in MODULES.values())
    limit = TRIES_PER_THOUSAND_LINES * num_lines // 1000
    assert num_tries < limit, f"{num_tries} try statements, and {limit} are too many: see CONTRIBUTING.md"


def test_no_module_is_named_after_nothing() -> None:
    empty = {"utils", "util", "helpers", "helper", "common", "misc", "experimental", "v2"}
    assert not [module for module in MODULES if empty & set(module.split("."))]


def test_code_and_documents_use_the_words_of_the_field() -> None:
    banned = re.compile(rf"\b({'|'.join(sorted(NOT_OUR_WORDS))})\b", re.IGNORECASE)
    documents = [*sorted((ROOT / "docs").glob("*.md")), *ROOT.glob("*.md")]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in (*sources("headway", "bench", "examples", "tests", "docs"), *documents)
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (match := banned.search(line.replace("_", " ")))
    ]
    assert not found


def test_classes_have_names_of_their_own() -> None:
    places: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    assert not {name: modules for name, modules in places.items() if len(modules) > 1}


def test_every_module_says_what_it_is() -> None:
    silent = [str(path) for path in sources("headway", "bench", "examples") if not ast.get_docstring(tree(path))]
    assert not silent


def test_the_configuration_stays_small() -> None:
    assert len([key for key in all_keys() if not key.startswith("algorithm.")]) < NUM_KNOBS
    assert all(sentence for sentence in all_keys().values()), "every knob has a sentence"


# Invariants are sentences in docstrings, and each has a test with the same words


@pytest.mark.parametrize(("number", "title"), INVARIANTS.items())
def test_every_invariant_is_a_sentence_in_a_module_docstring(number: int, title: str) -> None:
    stated = re.compile(rf"^\s*{number}\. {re.escape(title)}", re.MULTILINE)
    assert any(stated.search(ast.get_docstring(tree(path)) or "") for path in MODULES.values())


def test_a_number_in_a_docstring_always_means_the_same_invariant() -> None:
    for path in MODULES.values():
        for number, text in re.findall(r"^ {1,3}(\d+)\. (.+)$", ast.get_docstring(tree(path)) or "", re.MULTILINE):
            assert text.startswith(INVARIANTS[int(number)]), f"{path.name} calls invariant {number} {text!r}"


@pytest.mark.parametrize("number", INVARIANTS)
def test_every_invariant_is_named_by_a_test(number: int) -> None:
    named = re.compile(rf"\binvariant {number}\b|_invariant_{number}_", re.IGNORECASE)
    tests = [path for path in sources("tests") if path != Path(__file__)]
    assert any(named.search(path.read_text()) for path in tests)
