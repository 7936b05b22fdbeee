"""The notebook in examples/ runs from its first cell to its last, on a smaller run."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_quickstart_notebook_trains_plots_and_finds_swaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(ROOT / "examples/quickstart.ipynb", as_version=4)
    (parameters,) = [cell for cell in notebook.cells if cell.source.startswith("OVERRIDES = []")]
    model = tmp_path / "model"
    settings = {"run.dir": tmp_path / "run", "run.steps": 4, "model.path": model, "sft.out": model}
    settings |= {
        "trainer.batch_groups": 4,
        "evaluate.limit": 16,
        "evaluate.every": 2,
        "sft.steps": 5,
        "sft.batch_size": 8,
    }
    settings |= {"engine.max_num_seqs": 32}
    parameters.source = f"OVERRIDES = {[f'--{knob}={value}' for knob, value in settings.items()]!r}"
    nbclient.NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(ROOT / "examples")}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    data = [kind for output in outputs if "data" in output for kind in output.data]
    assert "image/png" in data, "the curves are drawn"
    printed = "".join(output.get("text", "") for output in outputs)
    assert "swapped before token" in printed or "no completion of this run" in printed
    assert not [output for output in outputs if output.output_type == "error"]
