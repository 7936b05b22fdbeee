"""The wheel, installed into a fresh environment outside the source tree, is the whole of Headway."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest
from system import write_config
from typer.testing import CliRunner

import headway
from headway.cli import app

ROOT = Path(__file__).parents[2]
EXTRAS = {"gpu", "ray", "vllm", "datasets", "code", "view", "dev", "docs"}


def test_the_extras_and_the_version_are_those_documented() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"].keys() >= EXTRAS
    assert "version" in project["dynamic"] and re.fullmatch(r"\d+\.\d+\.\d+", headway.__version__)
    assert CliRunner().invoke(app, ["--version"]).output.split() == ["headway", headway.__version__]
    documented = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/getting-started.md").read_text(), re.MULTILINE))
    assert documented >= project["optional-dependencies"].keys()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the tracked tree, as a clone has it."""
    folder = tmp_path_factory.mktemp("package")
    for name in ("headway", "pyproject.toml", "README.md", "LICENSE"):
        source, target = ROOT / name, folder / "source" / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", ".", "-w", ".."]
    subprocess.run(build, cwd=folder / "source", check=True, timeout=240)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def environment(wheel: Path) -> Path:
    """The bin/ of a fresh environment with the wheel; what it depends on is borrowed from this one."""
    folder = wheel.parent / "fresh"
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "borrowed.pth").write_text("\n".join(packages) + "\n")
    install = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "-q", "--no-deps"]
    subprocess.run([*install, str(wheel)], check=True, timeout=240)
    return folder / "bin"


def run(environment: Path, cwd: Path, *arguments: str, code: int = 0) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(environment / arguments[0]), *arguments[1:]],
        cwd=cwd,
        env={**clean, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_wheel_holds_the_viewers_assets_the_native_source_and_the_type_marker(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assets = {
        str(path.relative_to(ROOT)) for path in (ROOT / "headway/monitor/viewer/assets").rglob("*") if path.is_file()
    }
    assert assets and assets <= names
    assert {"headway/py.typed", "headway/engine/embedded/native.cpp"} <= names
    assert not [name for name in names if not name.startswith(("headway/", "headway_rl-"))]


@pytest.mark.slow
def test_an_installed_headway_trains_shows_generates_and_views_outside_the_tree(
    environment: Path, tmp_path: Path, tiny_model: str
) -> None:
    where = run(environment, tmp_path, "python", "-c", "import headway; print(headway.__file__)")
    assert where.startswith(str(environment.parent))
    config = write_config(tmp_path, tiny_model, run={"dir": "out", "steps": 2, "runtime": "local"})
    assert "run finished" in run(environment, tmp_path, "headway", "train", str(config))
    assert "reward" in run(environment, tmp_path, "headway", "show", "out")
    assert "finished" in run(environment, tmp_path, "headway", "runs", ".")
    script = 'import headway; print(len(headway.generate(headway.load_run("out"), ["1+1="], max_tokens=4)))'
    assert run(environment, tmp_path, "python", "-c", script).strip().endswith("1")
    refused = run(environment, tmp_path, "headway", "bench", "engine", code=1)
    assert refused.count("\n") == 1 and "benchmarks are in the source tree only" in refused
    assert_viewer_serves(environment, tmp_path)


def assert_viewer_serves(environment: Path, cwd: Path) -> None:
    viewer = subprocess.Popen(
        [str(environment / "headway"), "view", "out", "--port", "0"], cwd=cwd, stdout=subprocess.PIPE, text=True
    )
    try:
        assert viewer.stdout is not None
        link = re.search(r"http://\S+", viewer.stdout.readline())
        assert link
        with_cookies = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with with_cookies.open(link[0], timeout=60) as answer:
            assert answer.status == 200 and b"<html" in answer.read().lower()
    finally:
        viewer.send_signal(signal.SIGINT)
        viewer.wait(timeout=60)
