"""What documents say exists: every path, make target, command, flag, knob and config they name, and every module."""

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import TypeAdapter

from headway.cli import app
from headway.config import Config, all_keys, load
from headway.tasks import imports
from headway.tasks.datasets import load_rows
from headway.tasks.verifiers import needs_of

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
CONFIGS = sorted(ROOT.glob("configs/**/*.toml"))
TRUNKS = {path.name for path in ROOT.iterdir() if path.is_dir()} | {"headway", "configs", "examples", "docs"}

MADE_BY_RUNNING = ("runs/", "models/", ".venv/")
"""Where paths lead that a reader makes by following the document."""

documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
configs = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)


@cache
def commands() -> dict[str, Any]:
    # typer carries click within itself in some versions, so there is no one class to name here.
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


@cache
def run_files() -> set[str]:
    """What the docstring of launch.py says a run directory holds."""
    docstring = ast.get_docstring(ast.parse((ROOT / "headway/launch.py").read_text())) or ""
    listed = docstring.partition("A run directory holds:")[2]
    assert listed
    return {part for name in re.findall(r"[\w./]+", listed) for part in (name.strip("/."), name.split("/")[0])}


@cache
def generated_pages() -> set[str]:
    """Pages of the site that docs/reference.py makes of the code."""
    return set(re.findall(r'^    "([\w/]+\.md)":', (ROOT / "docs/reference.py").read_text(), re.MULTILINE))


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)


def spans(document: Path) -> list[str]:
    """Inline code, fenced blocks left out."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


def command_lines(document: Path) -> list[list[str]]:
    """Every command of bash blocks and inline code, as words, without comments and continuation marks."""
    lines = [line for block in blocks(document, "bash") for line in block.replace("\\\n", " ").splitlines()]
    candidates = [shlex.split(line, comments=True) for line in [*lines, *spans(document)] if line.count("'") % 2 == 0]
    return [[words[0].removeprefix(".venv/bin/"), *words[1:]] for words in candidates if words]


def headway_commands() -> list[Any]:
    found = {tuple(words) for document in DOCUMENTS for words in command_lines(document) if words[0] == "headway"}
    return [pytest.param(words, id=" ".join(words)) for words in sorted(found) if len(words) > 1]


def is_placeholder(word: str) -> bool:
    return word.isupper()


def named_paths(document: Path) -> set[str]:
    """Words that look like paths of this repository: below one of its folders, or ending like one of its files."""
    text = document.read_text()
    words = {word for span in spans(document) for word in span.split()}
    words |= {word for block in blocks(document, "bash") for word in block.split() if not word.startswith("-")}
    words |= {word for word in re.findall(r"[\w./-]+", text) if word.split("/")[0] in TRUNKS and "/" in word}
    words |= set(re.findall(r"(?<![\w-])[\w/-]+\.(?:py|toml|md|png|txt)\b", text))
    paths = {word.partition(":")[0].strip("(),'.") if not word.startswith(".") else word for word in words}
    looks_like_one = re.compile(r"[\w.-]+(/[\w.-]+)*(/|\.(py|toml|md|png|txt|json|jsonl))")
    return {path for path in paths if looks_like_one.fullmatch(path) or path.split("/")[0] in TRUNKS - {path}}


def exists(path: str, document: Path) -> bool:
    if Path(path).name.startswith("my_"):  # a file of the reader's own
        return True
    if (
        path in generated_pages()
        or path.startswith(MADE_BY_RUNNING)
        or path.strip("/") in run_files()
        or path in written_by_commands()
    ):
        return True
    # The file tree of the README names the package's files by their last name.
    return any(
        (folder / path).exists() for folder in (ROOT, document.parent, ROOT / "headway", ROOT / "headway/engine")
    )


@cache
def written_by_commands() -> set[str]:
    """Files a documented command writes: what follows --out."""
    lines = [words for document in DOCUMENTS for words in command_lines(document)]
    return {after for words in lines for word, after in pairwise(words) if word == "--out"}


@documents
def test_every_path_a_document_names_exists(document: Path) -> None:
    missing = sorted(path for path in named_paths(document) if not exists(path, document))
    assert not missing


@documents
def test_every_link_of_a_document_leads_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", document.read_text())
    assert not [link for link in links if link not in generated_pages() and not (document.parent / link).exists()]


def test_the_checks_see_the_documents() -> None:
    """A pattern that matches nothing would pass every test above."""
    readme = ROOT / "README.md"
    assert {"configs/quickstart.toml", "examples/custom_reward.py", "docs/quickstart.png"} <= named_paths(readme)
    assert ["make", "quickstart"] in command_lines(readme)
    assert len(headway_commands()) >= 8
    assert not exists("examples/nothing.py", readme) and not exists("headway/nothing.py", readme)


@documents
def test_every_make_target_a_document_names_exists(document: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    words_of_make = {word for words in command_lines(document) if words[0] == "make" for word in words[1:]}
    named = {word for word in words_of_make if "=" not in word}  # the others set variables
    assert named <= targets


@pytest.mark.parametrize("words", headway_commands())
def test_every_headway_command_a_document_shows_is_one(words: tuple[str, ...]) -> None:
    _, name, *arguments = words
    command = commands()[name]
    if not arguments:  # the command is spoken of, not shown
        return
    context = command.make_context(name, [*arguments], resilient_parsing=True)
    overrides, others = split_overrides(context.args)
    assert not overrides.keys() - all_keys().keys()
    if name == "bench":
        assert_benchmark(context.params["name"], others)
        return
    assert not others, f"{others} are neither options nor knobs"
    required = [parameter.name for parameter in command.params if parameter.required]
    assert all(context.params.get(parameter) is not None for parameter in required)
    path = str(context.params.get("config", "CONFIG"))
    if not is_placeholder(path) and not Path(path).name.startswith("my_"):  # a file of the reader's own
        load(ROOT / path, [word for word in context.args if word.startswith("--")])


def split_overrides(words: list[str]) -> tuple[dict[str, str], list[str]]:
    matches = {word: re.fullmatch(r"--([a-z_0-9]+(?:\.[a-z_0-9]+)+)=(.*)", word) for word in words}
    overrides = {match[1]: match[2] for match in matches.values() if match}
    return overrides, [word for word, match in matches.items() if not match]


def assert_benchmark(name: str, arguments: list[str]) -> None:
    text = (ROOT / "bench" / f"{name}.py").read_text()
    shared = [ROOT / "bench" / f"{module}.py" for module in re.findall(r"^from (\w+) import", text, re.MULTILINE)]
    text += "".join(path.read_text() for path in shared if path.is_file())  # options that several benchmarks share
    for word in arguments:
        assert not word.startswith("--") or f'"{word.partition("=")[0]}"' in text


@documents
def test_code_blocks_are_of_kinds_that_are_checked(document: Path) -> None:
    fences = re.findall(r"^ *```(.*)$", document.read_text(), re.MULTILINE)
    assert {*fences} <= {"", "bash", "python", "toml"}, "another kind of block would escape these tests"
    commands = r"^(?:```\n\s*\$|    (?:headway|make|pip|python|sbatch)) "
    assert not re.search(commands, document.read_text(), re.MULTILINE), "a command stands in a bash block"


@documents
def test_every_shell_command_is_of_a_known_program_and_names_what_exists(document: Path) -> None:
    for line in [line for block in blocks(document, "bash") for line in block.replace("\\\n", " ").splitlines()]:
        words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
        if words:
            assert_known(words[0].removeprefix(".venv/bin/"), words[1:])


def assert_known(program: str, words: list[str]) -> None:
    """`headway` and `make` have tests of their own; vLLM's command line lives in its own environment."""
    assert program in {"headway", "make", "python", "pip", "sbatch", "vllm", "."}, (
        f"{program} is not checked by any test"
    )
    if program == "sbatch":
        _, config, *overrides = words[[word.endswith(".sbatch") for word in words].index(True) :]
        load(ROOT / config, overrides)
    if program == "pip":
        extras = {extra for word in words for found in re.findall(r"\[(.+)\]", word) for extra in found.split(",")}
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert extras <= project["optional-dependencies"].keys()
    if program == "python" and words[0] == "-m":
        assert find_spec(words[1])
    elif program == "python":
        text = (ROOT / words[0]).read_text()
        assert all(f'"{word.partition("=")[0]}"' in text for word in words[1:] if word.startswith("--"))


@documents
def test_toml_in_a_document_is_a_config_or_a_part_of_one(document: Path, tmp_path: Path) -> None:
    for block in blocks(document, "toml"):
        sections = tomllib.loads(block)
        for name, values in sections.items():
            TypeAdapter(Config.model_fields[name].annotation).validate_python(values)
        if "model" in sections:  # a whole one
            (tmp_path / "my_task.toml").write_text(block)
            load(tmp_path / "my_task.toml")


@documents
def test_every_flag_and_knob_in_inline_code_exists(document: Path) -> None:
    options = {option for command in commands().values() for p in command.params for option in p.opts}
    sections = {key.split(".")[0] for key in all_keys()}
    for span in spans(document):
        if re.fullmatch(r"--[a-z-]+", span):
            assert span in options, f"{span} is no option of any command"
        knob = re.match(r"(?:--)?([a-z_]+(?:\.[a-z_0-9]+)+)(?:\s*=|$)", span)
        if knob and knob[1].split(".")[0] in sections and not re.search(r"\.(py|json|jsonl|png)$", knob[1]):
            assert knob[1] in all_keys(), f"{knob[1]} is no knob"


@documents
def test_python_in_a_document_is_python(document: Path) -> None:
    for block in blocks(document, "python"):
        compile(block, str(document), "exec")


def test_every_command_is_in_the_readme() -> None:
    shown = {words[1] for words in command_lines(ROOT / "README.md") if words[0] == "headway" and len(words) > 1}
    assert shown >= commands().keys()


def test_architecture_has_a_row_for_every_room() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    rooms = [path.name for path in (ROOT / "headway").iterdir() if (path / "__init__.py").exists()]
    assert not [room for room in rooms if f"| `headway/{room}/` |" not in text]


def test_every_room_explains_its_modules() -> None:
    """The docstring of a room's `__init__` names each of its modules, or the folder it lies in."""
    silent = []
    for room in [path for path in (ROOT / "headway").rglob("__init__.py") if path.parent.name != "headway"]:
        docstring = ast.get_docstring(ast.parse(room.read_text())) or ""
        names = [path.stem for path in room.parent.glob("*.py") if path.stem != "__init__"]
        silent += [f"{room.parent.name}: {name}" for name in names if f"`{name}`" not in docstring]
    assert not silent


def test_the_documents_name_a_test_for_every_invariant_that_names_it_back() -> None:
    rows = re.findall(r"^\| (\d+) \|[^|]+\| (.+) \|$", (ROOT / "docs/fault-tolerance.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 17))
    for number, files in rows:
        named = re.compile(rf"\binvariant {number}\b|_invariant_{number}_", re.IGNORECASE)
        silent = [name for name in re.findall(r"`([^`]+)`", files) if not named.search((ROOT / name).read_text())]
        assert not silent, f"{silent} do not speak of invariant {number}"


@configs
def test_every_shipped_config_parses(path: Path) -> None:
    assert load(path).run.dir == f"runs/{path.stem}"


@configs
def test_every_shipped_config_names_rows_its_verifier_can_score(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config: Config = load(path)
    of_data_sets = ("data/", "examples/mbpp.py")
    if all(task.train.startswith(of_data_sets) for task in config.named_tasks.values() if task.train):
        pytest.skip("its rows are a data set that is not shipped")
    needed = {config.task.prompt_field, *needs_of(imports.load(config.task.verifier))}
    for reference in filter(None, (config.task.train, config.task.eval)):
        assert all(needed <= row.keys() for row in load_rows(reference))
    if config.sft.train:
        supervised = {config.task.prompt_field, config.sft.completion_field}
        assert all(supervised <= row.keys() for row in load_rows(config.sft.train))


def test_gsm8ks_rows_are_what_its_config_expects() -> None:
    """One in the data set's form: the verifier finds the number after the marks, and takes the solution for right."""
    config = load(ROOT / "configs" / "gsm8k.toml")
    solution = "Each pack has 4*3 = <<4*3=12>>12 pens.\nSo there are 2*12 = <<2*12=24>>24.\n#### 24"
    row = {config.task.prompt_field: "How many pens are there?", config.sft.completion_field: solution}
    verify = imports.load(config.task.verifier)
    assert set(needs_of(verify)) <= row.keys()
    assert [verify(row, text) for text in (solution, "It is 24", "It is 12")] == [1.0, 1.0, 0.0]


def test_there_are_configs_and_documents_to_check() -> None:
    assert {path.name for path in CONFIGS} >= {"quickstart.toml", "smollm2.toml"}
    assert {path.name for path in DOCUMENTS} >= {"README.md", "CONTRIBUTING.md", "architecture.md"}


def test_no_measured_number_is_typed_by_hand() -> None:
    """Tables are what the records in docs/results say."""
    done = subprocess.run([sys.executable, "docs/tables.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
