"""The shape of the code: who may import whom, how long things may get, where each invariant is written and tested.

Growth is a decision: a new module goes into `LAYERS`, a file or function over its ceiling into `TOO_LONG`, each with
the reason beside it.
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

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "headway"

LAYERS: list[tuple[str, str]] = [
    # What a layer is, and its modules. A module imports only from layers above it in this list, or its own package.
    ("words everything is said in", "errors codec kinship"),
    ("nouns and knobs", "types config"),
    ("arithmetic", "staleness packing advantages losses optimizer logprob_kernels split looks proof"),
    ("memory from sizes", "fit"),
    ("starting a class somewhere", "runtime"),
    ("contracts of user code", "references verifiers workflows"),
    ("the log", "events"),
    ("what is made of the log, and who holds it", "record history wanted"),
    ("what is made of those", "ledger metrics picture"),
    ("what a person sees", "view"),
    ("the report", "report"),
    ("weights on a GPU, and over a connection", "device_weights weight_stream"),
    ("weights in files", "weight_files"),
    ("text, models, weights, what ranks do together", "tokenizer models weights collective"),
    ("prompts, batches, buffer, checkpoints", "prompts microbatch buffer checkpoint"),
    ("the engine protocol", "engine"),
    ("engines", "engine.embedded engine.vllm engine.fake"),
    ("the trainer; a child of the reward pool", "trainer reward_child"),
    ("several ranks as one trainer; warm-up on the trainer's parts; the pool", "ranks sft reward"),
    ("what an answer must be, which engine is asked", "answers routing"),
    ("the worker that calls engine and pool", "rollout"),
    ("measuring through the workers; recorded steps again", "evaluate retrain"),
    ("sharing a GPU", "colocation"),
    ("starting workers", "fleet"),
    ("keeping them alive", "supervise"),
    ("who is there", "roster"),
    ("the controller", "controller"),
    ("starting, stopping, going on", "launch resume plan"),
    ("the command line", "cli"),
]

SAME_LAYER = {
    ("launch", "resume"),  # launching a run goes on from its record
    ("resume", "launch"),  # going on starts from what was prepared
    ("plan", "launch"),  # a plan is a launch that stops after preparing
}

ENGINES = ("engine", "engine.embedded", "engine.vllm", "engine.fake")
WORKERS = (*ENGINES, "trainer", "ranks", "rollout", "reward", "reward_child", "sft")
BOSSES = ("controller", "roster", "supervise", "fleet", "launch", "resume", "plan", "cli")

NEVER_TORCH = """
    errors codec kinship types config staleness packing advantages proof runtime references verifiers workflows events
    record history ledger metrics picture view report buffer tokenizer prompts reward reward_child rollout evaluate
    engine cli weight_stream weight_files answers routing looks split wanted fit
"""
"""Modules that can be imported where torch is not: what runs in the controller, the reward pool and the viewer."""

TOO_LONG: dict[str, str] = {}
"""Exceptions to the ceilings: "path" or "path:function" to the reason. None so far."""

FILE_LINES, FUNCTION_LINES, NUM_KNOBS = 500, 80, 100

INVARIANTS = {
    1: "One admission authority",
    2: "Nothing vanishes",
    3: "Versions are the engine's",
    4: "η = 0 is synchronous training",
    5: "Interruption is invisible",
    6: "Parity",
    7: "The loss is Eq. 5",
    8: "Groups know themselves",
    9: "Stop reasons travel",
    10: "An error is never a reward",
    11: "Weight sync is proved",
    12: "The gradient does not depend on packing",
    13: "Generation waits for little",
    14: "A crash loses nothing",
    15: "Nothing hangs",
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
    """The entry of LAYERS a module belongs to: the longest listed prefix of its name."""
    listed = {name for _, names in LAYERS for name in names.split()}
    parts = module.split(".")
    while parts and ".".join(parts) not in listed:
        parts.pop()
    return ".".join(parts)


def height(module: str) -> int:
    return next(index for index, (_, names) in enumerate(LAYERS) if room(module) in names.split())


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


def test_every_module_has_a_layer() -> None:
    homeless = [module for module in MODULES if module and not room(module)]
    assert not homeless, f"put {homeless} into LAYERS"
    gone = [name for _, names in LAYERS for name in names.split() if name not in MODULES]
    assert not gone, f"LAYERS names {gone}, which do not exist"


def test_modules_import_only_from_layers_above_them_in_the_list() -> None:
    wrong = []
    for module, path in MODULES.items():
        for other in imported_modules(path):
            own_package = room(module) == room(other)
            if not own_package and height(other) >= height(module) and (room(module), room(other)) not in SAME_LAYER:
                wrong.append(f"{module} imports {other}")
    assert not wrong


def test_no_listed_exception_is_out_of_date() -> None:
    real = {(room(module), room(other)) for module, path in MODULES.items() for other in imported_modules(path)}
    assert real >= SAME_LAYER


def test_the_runtime_knows_nothing_of_rl() -> None:
    for module in MODULES:
        if room(module) == "runtime":
            known = {"codec", "errors", "kinship"}
            strangers = {other for other in reached(module) if room(other) != "runtime"} - known
            assert not strangers, f"{module} reaches {strangers}"


@pytest.mark.parametrize("worker", WORKERS)
def test_workers_do_not_know_their_boss(worker: str) -> None:
    assert not reached(worker) & set(BOSSES)


def test_ray_and_vllm_are_imported_only_where_that_back_end_lives() -> None:
    for module, path in MODULES.items():
        assert "ray" not in imported_roots(path) or room(module) == "runtime", f"{module} imports Ray"
        assert "vllm" not in imported_roots(path), f"{module} imports vLLM; it is spoken to as a server"


def test_user_code_is_loaded_by_rollout_workers_reward_workers_and_the_reader_of_rows_only() -> None:
    loaders = {module for module, path in MODULES.items() if "references" in imported_modules(path)}
    assert loaders == {"rollout", "reward_child", "prompts"}
    for module in ("engine.embedded", "trainer"):
        assert not {name for name in reached(module) if room(name) in ("references", "workflows", "verifiers")}


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


def test_no_module_is_named_after_nothing() -> None:
    empty = {"utils", "util", "helpers", "helper", "common", "misc", "experimental", "v2"}
    assert not [module for module in MODULES if empty & set(module.split("."))]


def test_every_module_says_what_it_is() -> None:
    silent = [str(path) for path in sources("headway", "bench", "examples") if not ast.get_docstring(tree(path))]
    assert not silent


def test_the_configuration_stays_small() -> None:
    assert len(all_keys()) < NUM_KNOBS
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
