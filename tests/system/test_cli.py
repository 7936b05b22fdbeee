"""The command line: every bad input is one line on standard error before anything starts, and each half runs alone."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from system import events_of, headway, run_inline, task_of, write_config

from headway import cli
from headway.config import Config, load
from headway.model.tokenizer import build_character_tokenizer
from headway.monitor.report import summarise
from headway.record.run import Run
from headway.record.shards import RunLog, read_jsonl
from headway.runtime.inline import InlineRuntime
from headway.runtime.local import LocalRuntime

Sections = dict[str, dict[str, Any]]
Command = Callable[..., tuple[int, str, str]]
Refused = Callable[..., str]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """`headway ARGUMENTS` in this process: exit code, standard output, standard error."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["headway", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def refused(command: Command, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """The one line that `headway train ARGUMENTS` ends with; no worker was started and no run begun."""

    def run(*arguments: str | Path) -> str:
        with monkeypatch.context() as patch:
            start_nothing(patch)
            code, _, error = command("train", *arguments)
        assert code == 1
        assert error.startswith("error: ") and error.count("\n") == 1 and error.endswith("\n"), error
        return error.removeprefix("error: ").rstrip()

    return run


def start_nothing(patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a worker would have been started")

    patch.setattr(InlineRuntime, "start", refuse)
    patch.setattr(LocalRuntime, "start", refuse)


Breaking = Callable[[Path], Sections]


def _write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def _not_a_model(tmp_path: Path) -> Sections:
    (tmp_path / "empty").mkdir()
    return {"model": {"path": f"{tmp_path}/empty"}}


def _unsupported(tmp_path: Path) -> Sections:
    (tmp_path / "gpt2").mkdir()
    _write(tmp_path / "gpt2" / "config.json", json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    return {"model": {"path": f"{tmp_path}/gpt2"}}


def _other_tokenizer(tmp_path: Path) -> Sections:
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "eos_token_id": 1}
    config = {"model_type": "llama", "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 64}
    build_character_tokenizer("abcdefghijklmnopqrstuvwxyz()[]0123456789+=").save_pretrained(tmp_path / "mixed")
    _write(tmp_path / "mixed" / "config.json", json.dumps(config | sizes))
    return {"model": {"path": f"{tmp_path}/mixed"}}


BAD: list[tuple[str, Breaking, str]] = [
    (
        "unknown key",
        lambda tmp: {"trainer": {"batch_group": 3}},
        "config.toml: unknown key trainer.batch_group; did you mean trainer.batch_groups?",
    ),
    (
        "unknown section",
        lambda tmp: {"stalenes": {"max_staleness": 3}},
        "config.toml: unknown key stalenes.max_staleness; did you mean staleness.max_staleness?",
    ),
    (
        "a value of the wrong kind",
        lambda tmp: {"trainer": {"lr": "fast"}},
        'config.toml: trainer.lr = "fast" is not possible: input should be a valid number',
    ),
    (
        "batch larger than the admission window",
        lambda tmp: {"rollout": {"group_size": 3, "max_groups": 2}},
        "rollout.max_groups = 2 can never fill a batch of trainer.batch_groups = 3; raise max_groups or lower",
    ),
    (
        "token budget smaller than the context",
        lambda tmp: {"trainer": {"token_budget": 31}},
        "trainer.token_budget = 31 is smaller than one sequence of engine.max_context = 32 tokens; raise the budget",
    ),
    (
        "token budget smaller than one sequence",
        lambda tmp: {
            "trainer": {"token_budget": 43},
            "sampling": {"max_tokens": 40},
            "engine": {"max_context": 0, "kv_tokens": 2048},
        },
        "trainer.token_budget = 43 is smaller than one sequence of up to 44 tokens (prompt and sampling.max_tokens)",
    ),
    (
        "memory for less than two sequences",
        lambda tmp: {"engine": {"max_context": 0, "kv_tokens": 512}},
        "engine.kv_tokens = 512 cannot hold two sequences of the context of 512 tokens; raise kv_tokens or lower",
    ),
    (
        "a context beyond the model's",
        lambda tmp: {"engine": {"max_context": 4096, "kv_tokens": 8192}, "trainer": {"token_budget": 4096}},
        "engine.max_context = 4096 is more than the model's 512; lower it",
    ),
    (
        "a row without the field its verifier needs",
        lambda tmp: {"task": {"train": task_of(tmp, "rows_without_answer"), "verifier": task_of(tmp, "verify")}},
        "task.py:rows_without_answer, row 1 has no field 'answer', which the verifier",
    ),
    (
        "no rows",
        lambda tmp: {"task": {"train": task_of(tmp, "no_rows"), "verifier": task_of(tmp, "verify")}},
        "task.py:no_rows has no rows; give at least one",
    ),
    (
        "no held-out rows",
        lambda tmp: {"task": {"eval": task_of(tmp, "no_rows")}},
        "task.py:no_rows has no rows; give at least one",
    ),
    (
        "a dataset that is not there",
        lambda tmp: {"task": {"train": f"{tmp}/nowhere.jsonl", "verifier": task_of(tmp, "verify")}},
        "nowhere.jsonl does not exist",
    ),
    (
        "a dataset that is not JSON",
        lambda tmp: {"task": {"train": _write(tmp / "rows.jsonl", '{"prompt": "1"}\n{"prompt"\n')}},
        "rows.jsonl, line 2: not valid JSON",
    ),
    (
        "a model that is not there",
        lambda tmp: {"model": {"path": f"{tmp}/nowhere"}},
        "nowhere does not exist; name a transformers directory or a hub model",
    ),
    ("a directory that is no model", _not_a_model, "empty is not a model directory: it has no config.json"),
    (
        "an unsupported family",
        _unsupported,
        "gpt2 is a gpt2 model, which the trainer does not run, whatever the engine; use one of the families llama",
    ),
    (
        "a prompt longer than the context",
        lambda tmp: {"task": {"train": task_of(tmp, "long_rows"), "verifier": task_of(tmp, "verify")}},
        "task.py:long_rows: 1 of 1 rows have prompts of more than 31 tokens, so none is left; raise engine.max_context",
    ),
    (
        "a verifier that does not import",
        lambda tmp: {"task": {"verifier": _write(tmp / "broken.py", "import nothing_like_it\n") + ":verify"}},
        "broken.py does not import: ModuleNotFoundError: No module named 'nothing_like_it'",
    ),
    (
        "a verifier that does not exist",
        lambda tmp: {"task": {"verifier": task_of(tmp, "verfy")}},
        "has no verfy; did you mean verify?",
    ),
    (
        "a workflow that does not exist",
        lambda tmp: {"rollout": {"workflow": "headway.rollout.workflows.single_turn:SingleTrun"}},
        "has no SingleTrun; did you mean SingleTurn?",
    ),
    (
        "a workflow that is none",
        lambda tmp: {"rollout": {"workflow": task_of(tmp, "Path")}},
        "has no coroutine `run(episode)`",
    ),
    (
        "a tokenizer of another model",
        _other_tokenizer,
        "gives token 44, and its model knows 40 tokens; use the model's own tokenizer",
    ),
    (
        "an empty stop string",
        lambda tmp: {"sampling": {"stop_strings": [""]}},
        "[sampling]: an empty stop string would stop every completion at its first token",
    ),
    ("a GPU that is not there", lambda tmp: {"engine": {"device": "cuda"}}, "engine.device = cuda asks for a GPU"),
    (
        "a GPU that is not there among several devices",
        lambda tmp: {"engine": {"device": "cpu,cuda:77", "count": 2}},
        "engine.device = cuda:77 asks for a GPU that is not there",
    ),
    (
        "W&B that is not installed",
        lambda tmp: {"metrics": {"wandb_project": "headway"}},
        "metrics.wandb_project = 'headway' needs the wandb package: pip install wandb, or clear the setting",
    ),
]


@pytest.mark.parametrize(("sections", "sentence"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_input_is_one_line_before_anything_starts(
    tmp_path: Path,
    tiny_model: str,
    refused: Refused,
    monkeypatch: pytest.MonkeyPatch,
    sections: Breaking,
    sentence: str,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # where it is installed, this makes importing it fail
    path = write_config(tmp_path, tiny_model, **sections(tmp_path))
    assert sentence in refused(path)
    events = tmp_path / "run" / "events.jsonl"
    assert not events.exists() or not events.read_text()


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
    broken = _write(tmp_path / "broken.toml", "[run\n")
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
    assert sentence == f"cannot make the run directory {tmp_path}/run: File exists; check run.dir"


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
