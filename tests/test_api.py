"""`headway.train`, `load_run` and `generate`, from scripts, from notebooks, and on runs that were never trained."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from recorded import RecordedRun, write_tokenizer

import headway
from headway.errors import ConfigError, HeadwayError
from headway.monitor.metric_names import meaning

ROOT = Path(__file__).parents[1]

SMALL = """
SMALL = {
    "run": {"dir": "runs/one", "steps": 2, "runtime": RUNTIME},
    "model": {"path": MODEL},
    "engine": {"max_num_seqs": 6, "max_context": 32, "kv_tokens": 1024},
    "sampling": {"max_tokens": 6},
    "rollout": {"group_size": 2},
    "trainer": {"batch_groups": 2, "token_budget": 64, "threads": 1},
    "metrics": {"tensorboard": False},
}
"""

TASK = """
import neighbour

OFFSET = 1

def rows():
    return [{"prompt": f"{a}+{b}=", "answer": neighbour.digit(a + b)} for a in range(3) for b in range(3)]

def verify(task, text):
    return OFFSET + 0.1 * len(text) + 0.0 * int(task["answer"])
"""

SCRIPT = """
import sys
import headway
assert "torch" not in sys.modules and "headway.config" not in sys.modules
if __name__ == "__main__":
    run = headway.train(SMALL, task={"train": rows, "eval": rows()[:4], "verifier": verify}, progress=False)
    assert run.status == "finished" and run.summary.steps == run.num_steps == 2
    assert [len(list(run.groups(step=step))) for step in (1, 2)] == [2, 2]
    rewards = [one.reward for group in run.groups() for one in group.trajectories]
    assert rewards and all(1.0 <= reward < 2.0 for reward in rewards), rewards
    print(len(headway.generate(run, ["1+1=", "2+2="], max_tokens=4)))
    print(*run.metrics().columns)
    tokens = run.tokens(next(run.groups(step=1)).id)
    trained = tokens[tokens.sampled]
    assert trained[["behaviour", "proximal", "current", "weight", "advantage"]].notna().all().all()
    assert not trained["mask"].any() and set(trained.version) == {0}
"""


def in_process(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(arguments, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def small(model: str, runtime: str) -> str:
    return SMALL.replace("MODEL", repr(model)).replace("RUNTIME", repr(runtime))


def write_neighbour(folder: Path) -> None:
    (folder / "neighbour.py").write_text("def digit(number):\n    return str(number % 10)\n")


def test_a_script_trains_its_own_functions_in_worker_processes(tmp_path: Path, tiny_model: str) -> None:
    write_neighbour(tmp_path)
    (tmp_path / "script.py").write_text(small(tiny_model, "local") + TASK + SCRIPT)
    done = in_process(sys.executable, "script.py", cwd=tmp_path)
    num_texts, columns = done.stdout.splitlines()
    assert num_texts == "2" and done.stderr == ""
    unexplained = [name for name in columns.split() if name != "seconds" and meaning(name) is None]
    assert "train/entropy" in columns and not unexplained
    run = headway.load_run(tmp_path / "runs/one")
    assert run.metrics().index.tolist() == [0, 1, 2] and run.metrics()["eval/accuracy"].notna().sum() == 2
    assert (run.model_path / "config.json").is_file()
    held_out = run.held_out()
    assert held_out.groupby("version").problem.nunique().to_dict() == {0: 4, 2: 4}
    assert set(held_out.prompt) == {"0+0=", "0+1=", "0+2=", "1+0="} and held_out.reward.between(1.0, 2.0).all()


def test_a_notebook_trains_functions_of_its_cells(tmp_path: Path, tiny_model: str) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    write_neighbour(tmp_path)
    train = 'import headway\nrun = headway.train(SMALL, task={"train": rows, "verifier": verify})\nrun'
    cells = [small(tiny_model, "inline"), TASK, train, "next(run.groups(step=1))", 'headway.generate(run, ["1+1="])']
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
        client.execute()
    shown = [output for cell in notebook.cells for output in cell.outputs]
    printed = "".join(output.text for output in shown if output.output_type == "stream")
    results = [output.data["text/plain"] for output in shown if output.output_type == "execute_result"]
    assert "step 2/2" in printed and "Traceback" not in printed
    assert results[0] == "<run 'runs/one': finished, step 2 of 2>" and results[1].startswith("Prompted(id=")


@pytest.fixture
def recorded(tmp_path: Path) -> RecordedRun:
    run = RecordedRun(tmp_path / "run", batch=2, size=2, prompts=3)
    write_tokenizer(tmp_path / "run" / "model")
    run.step()
    run.step()
    return run


def test_groups_are_those_of_the_step_with_texts_rewards_and_staleness(recorded: RecordedRun) -> None:
    recorded.finish_group(failure="verifier: down")
    recorded.end()
    run = headway.load_run(recorded.directory)
    first, second = run.groups(step=2)
    assert (first.id, second.id, first.state, first.step, first.staleness) == (2, 3, "trained", 2, 1)
    assert (first.row, first.prompt, first.trajectories[0].text) == (2, "what is 2?", "the answer is 2")
    assert first.trajectories[0].versions == (0, 1) and first.trajectories[0].stops == ("stop",)
    assert [group.id for group in run.groups()] == [0, 1, 2, 3, 4]
    assert run.group(4).state == "waiting" and run.group(4).failures == {2: "verifier: down"}
    with pytest.raises(HeadwayError, match="has no training step 3; it has 2"):
        run.groups(step=3)
    with pytest.raises(HeadwayError, match="has no group 5; it admitted 5"):
        run.group(5)
    with pytest.raises(HeadwayError, match="holds no saved model"):
        run.model_path  # noqa: B018


def test_tokens_show_where_a_swap_happened(recorded: RecordedRun) -> None:
    recorded.end()
    tokens = headway.load_run(recorded.directory).tokens(2, 1)
    sampled = tokens[tokens.sampled]
    assert "".join(sampled.text) == "the answer is 2" and set(sampled.version) == {0, 1}
    assert sampled.version.diff().fillna(0).astype(bool).sum() == 1
    assert sampled.behaviour.iloc[0] == pytest.approx(-0.1)


def test_hostile_text_is_escaped_by_repr_and_by_a_notebooks_table(recorded: RecordedRun) -> None:
    hostile = "<script>alert(1)</script>\x1b[31m\u202e"
    recorded.finish_group(texts=[hostile, hostile], asked=hostile)
    recorded.end()
    run = headway.load_run(recorded.directory)
    shown = repr(run.group(4)) + run.completions().tail(2)._repr_html_()
    assert run.group(4).trajectories[0].text == hostile
    assert "\x1b" not in repr(run.group(4)) and "\u202e" not in repr(run.group(4))
    assert "<script" not in run.completions().tail(2)._repr_html_() and "&lt;script&gt;" in shown
    table = run.completions().tail(2)
    assert table.completion.iloc[0] == hostile
    for picture in (
        repr(table),
        repr(table.completion),
        table._repr_html_(),
        repr(run.tokens(4)),
        str(table[["group"]]),
    ):
        assert not {"\x1b", "\u202e"} & set(picture), picture
    assert r"\x1b[31m\u202e" in repr(table.completion)
    assert pickle.loads(pickle.dumps(table)).equals(table)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (({"model": {"path": "m"}},), "run.dir is required"),
        (
            ({"model": {"path": "m"}, "run": {"dir": "DIR", "step": 1}},),
            "unknown key run.step; did you mean",
        ),
        (("nowhere.toml",), "config file nowhere.toml does not exist"),
        (({"run": {"dir": "DIR"}, "task": {"verifier": lambda task, text: 1.0}},), "give it a name with `def`"),
        (({"run": {"dir": "DIR"}, "task": {"train": [{"prompt": {1}}]}},), "is no plain value that a file can hold"),
    ],
)
def test_what_cannot_be_trained_is_one_sentence(tmp_path: Path, arguments: tuple[Any, ...], sentence: str) -> None:
    (config,) = arguments
    if isinstance(config, dict) and "run" in config:
        config["run"]["dir"] = str(tmp_path / "run")
    with pytest.raises(ConfigError) as caught:
        headway.train(config)
    assert sentence in str(caught.value)


def test_generate_refuses_what_cannot_work(tiny_model: str) -> None:
    for prompts, sentence in (("1+1=", "takes a list of prompts"), ([""], "a prompt is empty")):
        with pytest.raises(ConfigError, match=sentence):
            headway.generate(tiny_model, prompts)
    with pytest.raises(ConfigError, match="has 600 tokens, and the model's context is 512"):
        headway.generate(tiny_model, ["1" * 600])
    with pytest.raises(HeadwayError, match="cannot read the event log"):
        headway.load_run(tiny_model)
