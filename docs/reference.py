"""The documentation site's generated pages: the reference, from the code, and the front page, from the README.

mkdocs calls `on_files` before it builds (`make docs`); nothing generated is committed.
"""

import inspect
import re
from pathlib import Path
from typing import Any

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

    lines = [
        "# Knobs",
        "",
        "A config is TOML with one section per component; on the command line `--section.key=value`.",
    ]
    for name, field in Config.model_fields.items():
        section: Any = field.annotation
        if not hasattr(section, "model_fields"):
            continue
        lines += ["", f"## {name}", "", "| knob | default | |", "|---|---|---|"]
        for key, knob in section.model_fields.items():
            if hasattr(knob.annotation, "model_fields"):
                continue
            default = "required" if knob.is_required() else f"`{knob.get_default(call_default_factory=True)!r}`"
            lines.append(f"| `{name}.{key}` | {default} | {knob.description or ''} |".replace("\n", " "))
    return "\n".join(lines) + "\n"


def commands() -> str:
    from headway.cli import app

    lines = ["# Commands"]
    for name in sorted(typer.main.get_command(app).commands):  # type: ignore[attr-defined]
        shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "110", "NO_COLOR": "1", "TERM": "dumb"})
        lines += ["", f"## headway {name}", "", "```text", shown.output.strip(), "```"]
    return "\n".join(lines) + "\n"


def events() -> str:
    from headway.record import events as module

    lines = [
        "# Events",
        "",
        "One JSON object a line in `events.jsonl`, in order; `seq`, `time` and `kind` are in each.",
    ]
    kinds: dict[str, Any] = getattr(module, "KINDS", {})
    for kind, cls in kinds.items():
        lines += ["", f"## {kind}", "", inspect.getdoc(cls) or "", "", "```python", _fields(cls), "```"]
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
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, page in PAGES.items():
        files.append(File.generated(config, path, content=page()))
    return files
