"""The documentation site's generated pages: the reference, from the code, and the front page, from the README.

mkdocs calls `on_files` before it builds (`make docs`); nothing generated is committed.
"""

import inspect
import re
from pathlib import Path

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent


def front_page() -> str:
    """The README, with its links as they are from docs/."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"\]\(docs/", "](", text)
    return re.sub(
        r"\[([^\]]*)\]\((?!https?:|#)((?:\w|/)*(?:examples|bench|CONTRIBUTING|configs)[^)]*)\)", r"`\2`", text
    )


def knobs() -> str:
    from headway.config import Config
    from headway.knobs import describe

    lines = [
        "# Knobs",
        "",
        "A config is TOML with one section per component; on the command line `--section.key=value`. `headway knobs`",
        "prints this list, and `headway knobs FILTER` the part of it that mentions a word.",
    ]
    section = ""
    for knob in describe(Config):
        if knob.key.split(".")[0] != section:
            section = knob.key.split(".")[0]
            lines += ["", f"## {section}", "", "| knob | type | default | meaning |", "|---|---|---|---|"]
        kind = ", ".join(f"`{choice}`" for choice in knob.choices if choice) or knob.type
        default = f"`{knob.default}`" if knob.default else "required"
        lines.append(f"| `{knob.key}` | {kind} | {default} | {_cell(knob.sentence)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def metrics() -> str:
    from headway.monitor.metric_names import METRIC_NAMES

    lines = [
        "# Metrics",
        "",
        "TensorBoard files are in `tensorboard/` of the run directory, and W&B gets the same where",
        "`metrics.wandb_project` is set; `run.metrics()` has those of training and evaluation as a table. The step is",
        "the version. A `*` stands for a name of the run's own: an engine, a task, a component, a stop reason.",
        "With `metrics.samples_every`, `samples` is a table of completions with their rewards.",
    ]
    prefix = ""
    for name, meaning in METRIC_NAMES.items():
        if name.split("/")[0] != prefix:
            prefix = name.split("/")[0]
            lines += ["", f"## {prefix}", "", "| metric | meaning |", "|---|---|"]
        lines.append(f"| `{name}` | {_cell(meaning)} |")
    return "\n".join(lines) + "\n"


def presets() -> str:
    from headway.algorithm import PRESETS

    rows = []
    for name, (sentence, knobs) in PRESETS.items():
        set_ = ", ".join(f"`{knob} = {value!r}`".replace("'", '"') for knob, value in knobs.items())
        rows.append(f"| `{name}` | {_cell(sentence)} | {set_} |")
    return (
        "\n".join(
            [
                "# Presets",
                "",
                "What each `algorithm.preset` sets; a knob you set yourself wins.",
                "",
                "| preset | is | sets |",
                "|---|---|---|",
                *rows,
            ]
        )
        + "\n"
    )


PYTHON = """# Python API

::: headway.api.train

::: headway.api.load_run

::: headway.api.generate

::: headway.monitor.reader.RunReader
    options:
      filters: ["!^_", "!^(texts|state|load|evaluation|problem|trained_tokens|token_columns|prompted)$"]

{nouns}

::: headway.tasks.verifiers.verifier

::: headway.rollout.workflows.Workflow

::: headway.rollout.workflows.Episode
"""


def python() -> str:
    from headway.monitor.reader import Prompted, Scored
    from headway.monitor.report import Lengths, Summary

    return PYTHON.replace("{nouns}", "\n\n".join(map(_noun, (Prompted, Scored, Summary, Lengths))))


def _noun(cls: type, name: str = "") -> str:
    """A class that holds values: its sentence, and its fields with their comments."""
    return f"## {name or cls.__name__}\n\n{inspect.getdoc(cls)}\n\n```python\n{_fields(cls)}\n```"


_TERMINAL = {"COLUMNS": "88", "NO_COLOR": "1", "TERM": "dumb"}


def commands() -> str:
    from headway.cli import app

    lines = ["# Commands"]
    for name in sorted(typer.main.get_command(app).commands):  # type: ignore[attr-defined]
        shown = CliRunner().invoke(app, [name, "--help"], env=_TERMINAL, prog_name="headway")
        lines += ["", f"## headway {name}", "", "```text", shown.output.strip(), "```"]
    return "\n".join(lines) + "\n"


def events() -> str:
    from headway.record.events import KINDS

    lines = [
        "# Events",
        "",
        "One JSON object a line in `events.jsonl`, in order; `seq`, `time` and `kind` are in each.",
    ]
    for kind, cls in KINDS.items():
        lines += ["", _noun(cls, kind)]
    return "\n".join(lines) + "\n"


def _fields(cls: type) -> str:
    """The fields with their comments, as the class has them."""
    source = inspect.getsource(cls)
    return "\n".join(line.strip() for line in source.splitlines() if re.match(r"    \w+:", line))


PAGES = {
    "index.md": front_page,
    "reference/knobs.md": knobs,
    "reference/commands.md": commands,
    "reference/events.md": events,
    "reference/metrics.md": metrics,
    "reference/presets.md": presets,
    "reference/python.md": python,
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, page in PAGES.items():
        files.append(File.generated(config, path, content=page()))
    return files
