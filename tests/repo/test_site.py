"""The documentation site: every page has its place, the build is strict, and what is generated is whole."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from headway.config import all_keys
from headway.monitor.metric_names import METRIC_NAMES
from headway.record.events import KINDS

ROOT = Path(__file__).parents[2]


def test_every_document_has_its_place_in_the_navigation() -> None:
    placed = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert not {path.name for path in (ROOT / "docs").glob("*.md")} - set(placed)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="there is no mkdocs: make docs installs it")
def test_the_site_is_built_without_a_warning_and_its_reference_is_whole(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.stem: path.read_text() for path in (tmp_path / "site" / "reference").glob("*.html")}
    assert not [knob for knob in all_keys() if f"<code>{knob}</code>" not in pages["knobs"]]
    assert "such as {CPU" in pages["knobs"], "braces of a sentence are text, not attributes of the cell"
    assert not [name for name in METRIC_NAMES if f"<code>{name}</code>" not in pages["metrics"]]
    assert not [kind for kind in KINDS if f'id="{kind}"' not in pages["events"]]
    assert "Usage: headway train" in pages["commands"]
    assert all(name in pages["python"] for name in ("load_run", "RunReader", "eval_after", "needs", "Episode"))
