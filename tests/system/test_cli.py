"""The command line: every bad input is one line on standard error before anything starts, and each half runs alone."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Command, Refused, start_nothing, write
from system import events_of, headway, run_inline, task_of, write_config

from headway.config import Config, load
from headway.monitor.report import summarise
from headway.record.run import Run
from headway.record.shards import RunLog, read_jsonl


def test_bad_input_ends_the_real_command_with_one_line_and_exit_code_1(tmp_path: Path, tiny_model: str) -> None:
    path = write_config(tmp_path, tiny_model, task={"verifier": f"{tmp_path}/task.py:verfy"})
    done = headway("train", path)
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path}/task.py:verfy: {tmp_path}/task.py has no verfy; did you mean verify?\n"
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere.toml"], "config file nowhere.toml does not exist"),
        (["{config}", "--trainer.lr"], "override '--trainer.lr' is not of the form --section.key=value"),
        (["{config}", "--trainer.rl=1"], "unknown key trainer.rl"),
        (["{config}", "--resume"], "holds no run to resume; leave --resume out to start one"),
        (["{config}", "--from", "nowhere.jsonl"], "cannot read groups from nowhere.jsonl"),
        (["{broken}"], "broken.toml is not valid TOML"),
    ],
)
def test_arguments_that_cannot_work_are_one_line(
    tmp_path: Path,
    tiny_model: str,
    refused: Refused,
    arguments: list[str],
    sentence: str,
) -> None:
    config = write_config(tmp_path, tiny_model)
    broken = write(tmp_path / "broken.toml", "[run\n")
    path, *rest = [argument.format(config=config, broken=broken) for argument in arguments]
    assert sentence in refused(Path(path), *rest)
    assert not (tmp_path / "run").exists()


# Run directories


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> tuple[Path, Config]:
    """The config file of a run that came to its end."""
    home = tmp_path_factory.mktemp("finished")
    path = write_config(home, tiny_model, run={"steps": 2})
    config = load(path)
    run_inline(config)
    return path, config


def test_a_directory_that_holds_a_run_is_not_written_over(finished: tuple[Path, Config], refused: Refused) -> None:
    path, config = finished
    before = (Path(config.run.dir) / "events.jsonl").read_bytes()
    sentence = refused(path)
    assert sentence.startswith(
        f"{config.run.dir} already holds a run of 2 steps; add --resume to go on with it, --over"
    )
    assert (Path(config.run.dir) / "events.jsonl").read_bytes() == before


def test_a_directory_of_another_config_is_refused(finished: tuple[Path, Config], refused: Refused) -> None:
    path, config = finished
    sentence = refused(path, "--resume", "--sampling.top_k=5")
    assert sentence.startswith(f"sampling.top_k = 5 differs from the 0 of the run in {config.run.dir}")


def test_a_second_process_on_the_same_run_is_refused(finished: tuple[Path, Config], refused: Refused) -> None:
    path, config = finished
    log = RunLog(config.run.dir)
    try:
        sentence = refused(path, "--resume", "--run.steps=5")
    finally:
        log.close()
    assert "events.jsonl is being written by another run; wait until it ends, stop it, or choose another" in sentence


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_wrong_model_path_is_reported_without_importing_torch(tmp_path: Path, dry_run: bool) -> None:
    """Importing it takes seconds."""
    arguments = [
        "train",
        str(Path(__file__).parents[2] / "configs" / "quickstart.toml"),
        f"--run.dir={tmp_path / 'run'}",
        "--model.path=./nowhere",
    ]
    program = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        f"sys.argv = {['headway', *arguments, *['--dry-run'] * dry_run]!r}\n"
        "from headway.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "model.path = ./nowhere does not exist" in done.stdout + done.stderr


def test_a_run_directory_that_is_a_file_is_refused(tmp_path: Path, tiny_model: str, refused: Refused) -> None:
    (tmp_path / "run").write_text("")
    sentence = refused(write_config(tmp_path, tiny_model))
    assert sentence == f"cannot write to the run directory {tmp_path}/run: Not a directory; check run.dir"


@pytest.mark.parametrize("place", ["/proc/nowhere", "{tmp}/file", "{tmp}/file/run"])
def test_a_run_directory_that_cannot_be_used_is_refused_before_the_model_is_read(
    tmp_path: Path, refused: Refused, place: str
) -> None:
    (tmp_path / "file").write_text("")
    path = write_config(tmp_path, f"{tmp_path}/nowhere", run={"dir": place.format(tmp=tmp_path)})
    for flags in ([], ["--dry-run"]):
        assert refused(path, *flags).startswith("cannot write to the run directory ")


def test_a_dry_run_refuses_a_directory_that_holds_a_run(finished: tuple[Path, Config], refused: Refused) -> None:
    path, _ = finished
    assert "already holds a run of 2 steps; add --resume" in refused(path, "--dry-run")
    assert "sampling.top_k = 5 differs" in refused(path, "--dry-run", "--resume", "--sampling.top_k=5")


def test_a_directory_of_no_run_is_neither_reported_nor_replayed(tmp_path: Path, command: Command) -> None:
    for verb in ("report", "replay"):
        code, _, error = command(verb, tmp_path)
        assert code == 1 and error.startswith("error: cannot read the event log") and error.count("\n") == 1


# The verbs


def test_dry_run_prints_the_plan_and_starts_nothing(
    tmp_path: Path, tiny_model: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_nothing(monkeypatch)
    path = write_config(tmp_path, tiny_model, task={"train": f"{tmp_path}/task.py:one_row"}, sampling={"top_k": 5})
    code, out, _ = command("train", path, "--dry-run")
    assert code == 0 and not (tmp_path / "run").exists()
    assert "worst staleness" in out and "3 versions" in out
    assert "4 steps = 12 groups" in out
    assert "engine on cpu, trainer on cpu" in out
    assert "fewer than a batch" in out and "truncates sampling" in out


def test_dry_run_lists_the_engines_and_their_devices(tmp_path: Path, tiny_model: str, command: Command) -> None:
    path = write_config(tmp_path, tiny_model, run={"runtime": "local"}, engine={"count": 2})
    code, out, _ = command("train", path, "--dry-run")
    assert code == 0
    said = " ".join(re.sub("[│┃|]", " ", out).split())
    assert "controller, 2 engines, trainer" in said
    assert "engine-0 on cpu, engine-1 on cpu, trainer on cpu" in said and "for each engine" in said


def test_dry_run_lists_the_trainer_ranks_and_the_memory_of_each(
    tmp_path: Path, tiny_model: str, command: Command
) -> None:
    memory = []
    for ranks in (1, 2):
        path = write_config(tmp_path, tiny_model, run={"runtime": "local"}, trainer={"ranks": ranks})
        code, out, _ = command("train", path, "--dry-run")
        assert code == 0
        said = " ".join(re.sub("[│┃|]", " ", out).split())
        memory.append(re.findall(r"trainer memory (.*?) training step", said))
    assert "2 trainer ranks" in said and "trainer-0 on cpu, trainer-1 on cpu" in said
    assert memory[0] == ["0.00 GB plus activations"] and memory[1] == ["for each rank 0.00 GB plus activations"]


def test_dry_run_refuses_what_train_refuses(tmp_path: Path, tiny_model: str, refused: Refused) -> None:
    path = write_config(tmp_path, tiny_model)
    assert "has no verfy" in refused(path, "--dry-run", f"--task.verifier={task_of(tmp_path, 'verfy')}")


def test_report_makes_the_summary_and_the_picture_again(finished: tuple[Path, Config], command: Command) -> None:
    _, config = finished
    directory = Path(config.run.dir)
    before = json.loads((directory / "summary.json").read_text())
    for name in ("summary.json", "report.png"):
        (directory / name).unlink()
    code, out, _ = command("report", directory)
    assert code == 0 and "tokens by fate" in out
    assert json.loads((directory / "summary.json").read_text()) == before
    assert (directory / "report.png").exists()


def test_replay_says_that_the_weights_are_identical(finished: tuple[Path, Config], command: Command) -> None:
    _, config = finished
    code, out, _ = command("replay", config.run.dir)
    digest = [event.digest for event in events_of(config) if event.kind == "trained"][-1]
    assert code == 0 and "replayed 2 training steps" in out and digest in out


def test_eval_measures_the_model_as_it_is(finished: tuple[Path, Config], command: Command) -> None:
    path, config = finished
    trained = Path(config.run.dir) / "model"
    expected = summarise(Run.read(config.run.dir))
    for model, accuracy in ((config.model.path, expected.eval_before), (trained, expected.eval_after)):
        code, out, _ = command("eval", path, f"--model.path={model}")
        assert code == 0 and f"accuracy {accuracy:.1%} on 6 problems (0 without a verdict)" in out


def test_eval_without_held_out_rows_is_refused(finished: tuple[Path, Config], command: Command) -> None:
    code, _, error = command("eval", finished[0], '--task.eval=""')
    assert code == 1 and error == "error: task.eval names no held-out rows; set it to evaluate\n"


def test_each_half_runs_alone_and_together_they_are_a_training_step(
    finished: tuple[Path, Config], tmp_path: Path, command: Command
) -> None:
    """Groups made by `rollout` and trained by `train --from` give the weights that one whole step gives."""
    path, _ = finished
    out = tmp_path / "groups.jsonl"
    code, said, _ = command("rollout", path, "--out", str(out))
    assert code == 0 and f"3 groups with 9 trajectories written to {out}" in said
    groups = read_jsonl(out)
    assert [group.id for group in groups] == [0, 1, 2]
    arguments = ["--from", str(out), f"--run.dir={tmp_path}/half", "--run.steps=1"]
    code, said, _ = command("train", path, *arguments)
    assert code == 0 and "step 1: loss" in said and f"model saved to {tmp_path}/half/model" in said
    whole = load(path, [f"--run.dir={tmp_path}/whole", "--run.steps=1", "--staleness.max_staleness=0"])
    run_inline(whole)
    weights = "model/model.safetensors"
    assert (tmp_path / "half" / weights).read_bytes() == (tmp_path / "whole" / weights).read_bytes()


def test_train_from_refuses_too_few_groups_and_a_directory_that_holds_a_run(
    finished: tuple[Path, Config], tmp_path: Path, command: Command, refused: Refused
) -> None:
    path, config = finished
    out = tmp_path / "groups.jsonl"
    code, _, _ = command("rollout", path, "--out", str(out), "--groups", "4")
    assert code == 0
    few = refused(path, "--from", str(out), "--trainer.batch_groups=5")
    assert few.startswith("4 groups with trajectories do not fill one batch of trainer.batch_groups = 5")
    held = refused(path, "--from", str(out))
    assert held == f"{config.run.dir} already holds a run, whose model would be replaced; choose another run.dir"


def test_knobs_lists_every_key(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    code, out, _ = command("knobs")
    assert code == 0 and "staleness.max_staleness" in out and "the bound η in versions" in out


def run_and_look(*arguments: str) -> tuple[str, float, list[str]]:
    """`headway ARGUMENTS` in a process of its own: what it says, its CPU seconds, and what heavy it imported."""
    program = (
        "import sys, time\n"
        f"sys.argv = ['headway', *{arguments!r}]\n"
        "from headway import cli\n"
        "try:\n    cli.main()\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'matplotlib', 'tensorboard'} & sys.modules.keys()\n"
        "print(f'\\n{time.process_time()}', *sorted(heavy))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    cpu_s, *heavy = done.stdout.splitlines()[-1].split()
    return done.stdout + done.stderr, float(cpu_s), heavy


def test_help_is_instant_and_imports_nothing_heavy() -> None:
    said, cpu_s, heavy = run_and_look("--help")
    assert "train" in said and "replay" in said
    assert not heavy and cpu_s < 1.0


@pytest.mark.parametrize("override", ["--model.path=/no/model", "--task.train=/no/rows.jsonl"])
def test_a_path_that_leads_nowhere_is_reported_before_anything_heavy(
    tmp_path: Path, tiny_model: str, override: str
) -> None:
    said, _, heavy = run_and_look("train", str(write_config(tmp_path, tiny_model)), override)
    assert "does not exist" in said
    assert not {"torch", "transformers"} & {*heavy}
