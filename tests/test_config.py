"""Every way a config can be wrong is one sentence that says what, where and what to do."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from headway.codec import decode, encode
from headway.config import Config, all_keys, load, validate
from headway.errors import ConfigError

ROOT = Path(__file__).parents[1]
LEAST = {"model": {"path": "m"}, "task": {"train": "rows.jsonl", "verifier": "headway.tasks.verifiers.number:number"}}
LEAST_TOML = '[model]\npath = "m"\n[task]\ntrain = "rows.jsonl"\nverifier = "headway.tasks.verifiers.number:number"\n'


def with_values(**sections: Any) -> dict[str, Any]:
    values: dict[str, Any] = {name: dict(section) for name, section in LEAST.items()}
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return values


def refusal(**sections: Any) -> str:
    """What is said of the values, without the leading name of the place."""
    with pytest.raises(ConfigError) as error:
        validate(with_values(**sections), "my.toml")
    said = str(error.value)
    assert said.startswith("my.toml: ") and "\n" not in said
    return said.removeprefix("my.toml: ")


def write(tmp_path: Path, text: str = LEAST_TOML) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(text)
    return path


def load_refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(path, list(overrides))
    assert "\n" not in str(error.value)
    return str(error.value)


# Keys


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"trainer": {"token_bugdet": 64}}, "unknown key trainer.token_bugdet; did you mean trainer.token_budget?"),
        ({"model": {"init": {"layers": 2}}}, "unknown key model.init.layers; did you mean model.init.num_layers?"),
        ({"trainr": {"lr": 1.0}}, "unknown key trainr.lr; did you mean trainer.lr?"),
        ({"run": {"qqqqq": 1}}, "unknown key run.qqqqq"),
        ({"qqqqq": {}}, "unknown key qqqqq"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(sections: dict[str, Any], said: str) -> None:
    assert refusal(**sections) == said


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"trainer": {"max_staleness": 2}}, "unknown key trainer.max_staleness; did you mean staleness.max_staleness?"),
        ({"trainer": {"group_size": 2}}, "unknown key trainer.group_size; did you mean rollout.group_size?"),
        ({"sampling": {"clip_eps": 0.1}}, "unknown key sampling.clip_eps; did you mean algorithm.clip_eps?"),
        ({"lr": 1e-3}, "unknown key lr; did you mean trainer.lr?"),
    ],
)
def test_a_key_of_another_section_is_sent_there(sections: dict[str, Any], said: str) -> None:
    assert refusal(**sections) == said


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "config: model is required (section [model])"),
        (
            {"model": {}},
            "config: model.path is required (transformers directory or hub name of the model to start from)",
        ),
        (
            {"model": {"path": "m"}, "task": {"train": "r"}},
            "config: task.verifier is required (file.py:function, (task, text) -> score)",
        ),
    ],
)
def test_a_required_key_is_named_with_its_meaning(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate(values)
    assert str(error.value) == said


# Values


def refusal_of(key: str, value: Any) -> str:
    """Why a value is not possible, without the repetition of what was given."""
    section, name = key.split(".")
    said = refusal(**{section: {name: value}})
    assert said.startswith(f"{key} = {json.dumps(value)} is not possible: ")
    return said.partition(" is not possible: ")[2]


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("run.steps", "many", "input should be a valid integer"),
        ("run.steps", "3", "input should be a valid integer"),
        ("run.steps", 2.5, "input should be a valid integer"),
        ("run.steps", True, "input should be a valid integer"),
        ("run.deterministic", "yes", "input should be a valid boolean"),
        ("trainer.lr", "1e-4", "input should be a valid number"),
        ("model.path", 3, "input should be a valid string"),
        ("sampling.stop_strings", "\n", "input should be a valid list"),
    ],
)
def test_a_value_of_another_type_is_refused(key: str, value: Any, why: str) -> None:
    assert refusal_of(key, value) == why


def test_a_value_of_another_type_in_a_list_or_for_a_section_is_refused() -> None:
    said = refusal(sampling={"stop_strings": ["a", 1]})
    assert said == "sampling.stop_strings.1 = 1 is not possible: input should be a valid string"
    assert refusal(run=3) == "run = 3 is not possible: it is a section, written [run]"


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("trainer.lr", 0.0, "input should be greater than 0"),
        ("trainer.lr", float("inf"), "input should be a finite number"),
        ("trainer.lr", float("nan"), "input should be a finite number"),
        ("trainer.beta1", 1.0, "input should be less than 1"),
        ("trainer.minibatches", 0, "input should be greater than or equal to 1"),
        ("staleness.max_staleness", -1, "input should be greater than or equal to 0"),
        ("staleness.window", -2, "input should be greater than or equal to -1"),
        ("sampling.temperature", 0.0, "input should be greater than 0"),
        ("sampling.top_p", 1.5, "input should be less than or equal to 1"),
        ("algorithm.clip_eps", 1.5, "input should be less than or equal to 1"),
        ("algorithm.objective", "ppo", "input should be 'decoupled', 'naive', 'cispo', 'sapo' or 'reinforce'"),
        ("model.dtype", "fp8", "input should be 'float32', 'bfloat16' or 'float16'"),
    ],
)
def test_a_value_out_of_range_is_refused(key: str, value: Any, why: str) -> None:
    assert refusal_of(key, value) == why


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"rollout": {"max_groups": 31}},
            "rollout.max_groups = 31 can never fill a batch of trainer.batch_groups = 32; "
            "raise max_groups or lower batch_groups",
        ),
        (
            {"engine": {"max_context": 512}, "trainer": {"token_budget": 511}},
            "trainer.token_budget = 511 is smaller than one sequence of engine.max_context = 512 tokens; "
            "raise the budget or lower the context",
        ),
        (
            {"staleness": {"min_staleness": 5, "max_staleness": 4}},
            "staleness.min_staleness = 5 is above staleness.max_staleness = 4; lower one or raise the other",
        ),
        (
            {"model": {"path": "m", "lora": {"adapter": "a"}}},
            "model.lora.adapter = a needs model.lora.rank, the adapter's own; set it",
        ),
        (
            {"model": {"path": "m", "lora": {"rank": 8}}, "trainer": {"ranks": 2}},
            "model.lora.rank = 8 is for one trainer rank; set trainer.ranks = 1 or model.lora.rank = 0",
        ),
        (
            {
                "model": {"path": "m", "lora": {"rank": 8}},
                "engine": {"kind": "vllm", "vllm_python": "p", "kv_on_swap": "keep"},
            },
            "model.lora.rank = 8 gives vLLM another adapter at each swap, which computes keys and values anew, and "
            "engine.kv_on_swap = keep; set recompute or drain",
        ),
        (
            {"model": {"path": "m", "lora": {"rank": 513}}, "engine": {"kind": "vllm", "vllm_python": "p"}},
            "model.lora.rank = 513 is more than vLLM's adapters have, which is 512; lower it",
        ),
        (
            {"trainer": {"minibatches": 5, "batch_groups": 4}},
            "trainer.minibatches = 5 is more than trainer.batch_groups = 4; lower minibatches",
        ),
        (
            {"engine": {"max_context": 512, "kv_tokens": 1023}},
            "engine.kv_tokens = 1023 cannot hold two sequences of engine.max_context = 512; "
            "raise kv_tokens or lower max_context",
        ),
        (
            {"engine": {"max_context": 256}},
            "sampling.max_tokens = 256 leaves no room for a prompt in engine.max_context = 256; lower max_tokens",
        ),
        (
            {"rollout": {"group_size": 1}},
            "algorithm.baseline = group compares trajectories of one prompt and needs rollout.group_size of 2 or more",
        ),
        (
            {"engine": {"device": "tpu"}},
            "engine.device = tpu is neither cpu nor cuda nor a GPU by number, such as cuda:1; set one of them",
        ),
        (
            {"engine": {"device": "cuda:0,cuda1", "count": 2}},
            "engine.device = cuda1 is neither cpu nor cuda nor a GPU by number, such as cuda:1; set one of them",
        ),
        (
            {"engine": {"device": "cuda:0,cuda:1"}},
            "engine.device = cuda:0,cuda:1 names more devices than engine.count = 1; raise count or name fewer",
        ),
        (
            {"trainer": {"device": "cuda:0, gpu", "ranks": 2}},
            "trainer.device = gpu is neither cpu nor cuda nor a GPU by number, such as cuda:1; set one of them",
        ),
        (
            {"trainer": {"device": "cuda:0,cuda:1"}},
            "trainer.device = cuda:0,cuda:1 names more devices than trainer.ranks = 1; raise ranks or name fewer",
        ),
        (
            {"trainer": {"device": "cpu,cuda:1", "ranks": 2}},
            "trainer.device = cpu,cuda:1 mixes cpu and GPUs, and ranks of one kind cannot talk to the other; "
            "name one kind",
        ),
        (
            {"trainer": {"device": "cuda,cuda:0", "ranks": 2}},
            "trainer.ranks = 2 need a GPU each, and trainer.device = cuda,cuda:0 names 1; name more or lower ranks",
        ),
        (
            {"trainer": {"ranks": 2}, "run": {"runtime": "inline"}},
            "trainer.ranks = 2 are processes, and run.runtime = inline has one; set run.runtime = local or ranks = 1",
        ),
        (
            {"engine": {"kind": "vllm"}},
            "engine.kind = vllm needs servers: name an interpreter that has vLLM in engine.vllm_python, or servers "
            "that run already in engine.urls",
        ),
        (
            {"engine": {"urls": "http://a:1"}},
            "engine.urls is for vLLM servers, and engine.kind = embedded; set engine.kind = vllm or leave it out",
        ),
        (
            {"engine": {"kind": "vllm", "urls": "http://a:1", "vllm_python": "p"}},
            "engine.urls names servers that run already, and engine.vllm_python says to start them; leave one out",
        ),
        (
            {"engine": {"kind": "vllm", "urls": "http://a:1", "vllm_args": "--x"}},
            "engine.vllm_args is for servers that are started here, and engine.urls names some that run already; "
            "give it to those who start them",
        ),
        (
            {"engine": {"kind": "vllm", "urls": "http://a:1, http://b:1"}},
            "engine.urls names 2 servers, and engine.count = 1; set engine.count = 2",
        ),
        (
            {"engine": {"kind": "vllm", "urls": "a:8000"}},
            "engine.urls names a:8000, which is no server's address; write it like http://host:8000",
        ),
        (
            {"engine": {"kind": "vllm", "vllm_python": "p"}, "run": {"deterministic": True}},
            "run.deterministic is the embedded engine's, and engine.kind = vllm; turn it off",
        ),
        (
            {"engine": {"kind": "vllm", "vllm_python": "p"}, "sampling": {"top_k": 5, "temperature": 0.7}},
            "with top-k or top-p, vLLM gives log-probs of the full distribution at temperature 1 only; set "
            "sampling.temperature = 1 and evaluate.temperature to 0 or 1, or sampling.top_k = 0 and sampling.top_p = 1",
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused(sections: dict[str, Any], said: str) -> None:
    assert refusal(**sections) == said


@pytest.mark.parametrize(
    "sections",
    [
        {"rollout": {"max_groups": 32}},
        {"engine": {"max_context": 512}, "trainer": {"token_budget": 512}},
        {"trainer": {"minibatches": 4, "batch_groups": 4}},
        {"engine": {"max_context": 512, "kv_tokens": 1024}},
        {"engine": {"max_context": 257}},
        {"rollout": {"group_size": 1}, "algorithm": {"baseline": "none", "normalise": "batch"}},
        {"engine": {"device": "cuda"}},
        {"engine": {"device": "cuda:0,cuda:1", "count": 2}},
        {"trainer": {"device": "cuda:0,cuda:1", "ranks": 2}},
        {"trainer": {"ranks": 8}},
        {"engine": {"kind": "vllm", "urls": "http://a:8000/, https://b", "count": 2}},
        {"engine": {"kind": "vllm", "vllm_python": "p"}, "sampling": {"top_p": 0.9, "temperature": 1.0}},
        {"engine": {"kind": "vllm", "vllm_python": "p"}, "sampling": {"temperature": 0.7}},
        {"trainer": {"lr": 1}},
    ],
)
def test_values_at_the_edge_of_a_contradiction_are_accepted(sections: dict[str, Any]) -> None:
    config = validate(with_values(**sections))
    for section, knobs in sections.items():
        assert all(getattr(getattr(config, section), name) == value for name, value in knobs.items())


@pytest.mark.parametrize(
    ("knobs", "placement"),
    [
        ({}, {"engine": "cpu"}),
        ({"count": 2}, {"engine-0": "cpu", "engine-1": "cpu"}),
        (
            {"count": 3, "device": "cuda:0, cuda:1"},
            {"engine-0": "cuda:0", "engine-1": "cuda:1", "engine-2": "cuda:0"},
        ),
    ],
)
def test_devices_are_dealt_out_to_the_engines_by_turns(knobs: dict[str, Any], placement: dict[str, str]) -> None:
    assert validate(with_values(engine=knobs)).engine.placement == placement


def test_devices_are_dealt_out_to_the_ranks_by_turns() -> None:
    assert validate(with_values()).trainer.placement == {"trainer": "cpu"}
    two = validate(with_values(trainer={"ranks": 2, "device": "cuda:1, cuda:0"})).trainer
    assert two.placement == {"trainer-0": "cuda:1", "trainer-1": "cuda:0"}


# Files and overrides


def test_a_first_run_needs_five_lines_and_is_named_after_its_file(tmp_path: Path) -> None:
    config = load(write(tmp_path))
    assert config.run.dir == "runs/small" and config.model.path == "m" and config.trainer.batch_groups == 32


@pytest.mark.parametrize(("written", "found"), [('""', "runs/small"), ('"mine"', "mine")])
def test_an_empty_run_directory_means_the_usual_one(tmp_path: Path, written: str, found: str) -> None:
    assert load(write(tmp_path, LEAST_TOML + f"[run]\ndir = {written}\n")).run.dir == found


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert load_refusal(tmp_path / "no.toml") == f"config file {tmp_path / 'no.toml'} does not exist"
    assert load_refusal(tmp_path) == f"config file {tmp_path} does not exist"


def test_text_that_is_not_toml_is_named_with_its_line(tmp_path: Path) -> None:
    said = load_refusal(write(tmp_path, "[run]\nsteps = \n"))
    assert said.startswith(f"{tmp_path / 'small.toml'} is not valid TOML: ") and "line 2" in said


def test_bytes_that_are_not_text_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_bytes(b"\xff\xfe[run]")
    assert load_refusal(path).startswith(f"{path} is not valid TOML: 'utf-8' codec can't decode")


def test_a_problem_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, LEAST_TOML + "[trainer]\nlr = -1.0\n")
    assert load_refusal(path) == f"{path}: trainer.lr = -1.0 is not possible: input should be greater than 0"


def test_a_section_that_is_a_number_is_one_sentence(tmp_path: Path) -> None:
    path = write(tmp_path, "run = 3\n" + LEAST_TOML)
    assert load_refusal(path) == f"{path}: run = 3 is not possible: it is a section, written [run]"
    said = load_refusal(path, "--run.steps=3")
    assert said == "override '--run.steps=3': run is not a section"


def test_overrides_are_toml_values_or_plain_text(tmp_path: Path) -> None:
    overrides = [
        "--run.steps=7",
        "trainer.lr=1e-4",
        "--run.deterministic=true",
        '--sampling.stop_strings=["a", "b"]',
        "--task.suffix= think = hard",
        '--run.dir="quoted"',
        "--model.init.hidden_size=64",
        "--run.steps=9",
    ]
    config = load(write(tmp_path), overrides)
    assert config.run.steps == 9 and config.trainer.lr == 1e-4 and config.run.deterministic
    assert config.sampling.stop_strings == ["a", "b"] and config.task.suffix == " think = hard"
    assert config.run.dir == "quoted" and config.model.init.hidden_size == 64


def test_an_override_may_be_written_with_a_space_and_names_with_commas_or_as_an_array(tmp_path: Path) -> None:
    overrides = [
        "--run.steps",
        "7",
        '--engine.device=["cuda:0", "cuda:1"]',
        "--engine.count",
        "2",
        "--model.dtype=bf16",
    ]
    config = load(write(tmp_path), overrides)
    assert config.run.steps == 7 and config.engine.devices == ["cuda:0", "cuda:1"] and config.model.dtype == "bfloat16"
    assert load(write(tmp_path), ["--engine.device=cuda:0,cuda:1", "--engine.count=2"]).engine == config.engine
    in_toml = write(tmp_path, LEAST_TOML + '[engine]\ncount = 2\ndevice = ["cuda:0", "cuda:1"]\n')
    assert load(in_toml).engine == config.engine


def test_under_ray_each_rank_reserves_a_gpu_of_its_own() -> None:
    config = validate(with_values(trainer={"device": "cuda", "ranks": 2}, run={"runtime": "ray"}))
    assert set(config.trainer.placement.values()) == {"cuda"} and len(config.trainer.placement) == 2


def test_defaults_suit_a_fine_tuned_model_and_the_papers_values_are_a_file() -> None:
    config, paper = validate(with_values()), load(ROOT / "configs" / "paper.toml")
    assert (config.trainer.lr, config.algorithm.behaviour_cap, config.algorithm.behaviour_cap_mode) == (
        1e-6,
        5.0,
        "mask",
    )
    assert (paper.trainer.lr, paper.trainer.batch_groups, paper.rollout.group_size) == (2e-5, 512, 16)
    assert (paper.trainer.minibatches, paper.algorithm.behaviour_cap, paper.model.dtype) == (4, 0.0, "float16")
    validate(with_values(algorithm={"objective": "naive"}))


@pytest.mark.parametrize("name", ["2024", "1e3", "true", "2024-01-01", "[a]"])
def test_text_that_looks_like_a_number_stays_text_where_text_is_wanted(tmp_path: Path, name: str) -> None:
    assert load(write(tmp_path), [f"--run.dir={name}"]).run.dir == name


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("--steps=3", "override '--steps=3' is not of the form --section.key=value; did you mean run.steps?"),
        ("--lr=3", "override '--lr=3' is not of the form --section.key=value; did you mean trainer.lr?"),
        (
            "--learning-rate=3",
            "override '--learning-rate=3' is not of the form --section.key=value; did you mean trainer.lr?",
        ),
        ("--run.steps", "override '--run.steps' is not of the form --section.key=value; did you mean run.steps?"),
        ("--model.path.x=3", "override '--model.path.x=3': path is not a section"),
    ],
)
def test_an_override_of_another_form_is_refused(tmp_path: Path, override: str, said: str) -> None:
    assert load_refusal(write(tmp_path), override) == said


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("--run.stepz=3", "unknown key run.stepz; did you mean run.steps?"),
        ("--run.steps=few", 'run.steps = "few" is not possible: input should be a valid integer'),
        ("--trainr.lr=1", "unknown key trainr.lr; did you mean trainer.lr?"),
        ("--optim.lr=1", "unknown key optim.lr; did you mean trainer.lr?"),
        ("--trainer.learning_rate=1", "unknown key trainer.learning_rate; did you mean trainer.lr?"),
    ],
)
def test_an_override_is_checked_like_the_file(tmp_path: Path, override: str, said: str) -> None:
    path = write(tmp_path)
    assert load_refusal(path, override) == f"{path}: {said}"


# The surface


def test_every_knob_has_one_short_sentence() -> None:
    keys = all_keys()
    assert 40 < len([key for key in keys if not key.startswith("algorithm.")]) < 130
    for key, sentence in keys.items():
        assert 3 <= len(sentence) <= 100 and "\n" not in sentence, key
        assert sentence[0] not in " ." and not sentence.endswith((".", " ")), key
    assert len(set(keys.values())) > len(keys) - 8  # a sentence copied from knob to knob says nothing


def test_sections_are_frozen_and_travel(tmp_path: Path) -> None:
    config = load(write(tmp_path), ["--trainer.lr=3e-5"])
    with pytest.raises(ValidationError):
        config.trainer.lr = 1.0  # type: ignore[misc]
    assert decode(encode(config.trainer)) == config.trainer and decode(encode(config)) == config


def test_a_config_survives_the_event_log(tmp_path: Path) -> None:
    config = load(write(tmp_path))
    assert Config.model_validate(json.loads(json.dumps(config.model_dump()))) == config


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_every_shipped_config_is_valid(path: Path) -> None:
    assert load(path).run.dir


@pytest.mark.slow
def test_reading_a_config_needs_no_torch(tmp_path: Path) -> None:
    script = "import sys; from headway.config import load; load(sys.argv[1]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script, str(write(tmp_path))], check=True, timeout=120)
