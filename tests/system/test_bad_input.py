"""Every bad input is one sentence before anything heavy starts, in a dry run too."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Refused, write
from system import task_of, write_config

from headway.model.tokenizer import build_character_tokenizer

Sections = dict[str, dict[str, Any]]
Breaking = Callable[[Path], Sections]


def _not_a_model(tmp_path: Path) -> Sections:
    (tmp_path / "empty").mkdir()
    return {"model": {"path": f"{tmp_path}/empty"}}


def _unsupported(tmp_path: Path) -> Sections:
    (tmp_path / "gpt2").mkdir()
    write(tmp_path / "gpt2" / "config.json", json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    return {"model": {"path": f"{tmp_path}/gpt2"}}


def _other_tokenizer(tmp_path: Path) -> Sections:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "eos_token_id": 1}
    config = {"model_type": "llama", "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 64}
    build_character_tokenizer("abcdefghijklmnopqrstuvwxyz()[]0123456789+=").save_pretrained(tmp_path / "mixed")
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config, **sizes))
    made.save_pretrained(tmp_path / "mixed")
    return {"model": {"path": f"{tmp_path}/mixed"}}


def _other_reference(tmp_path: Path) -> Sections:
    build_character_tokenizer("01+=").save_pretrained(tmp_path / "other")
    return {"algorithm": {"kl_coef": 0.1, "reference": f"{tmp_path}/other"}}


BAD: list[tuple[str, Breaking, str]] = [
    (
        "a reference of another vocabulary",
        _other_reference,
        "other has another vocabulary (7 tokens) than ",
    ),
    (
        "a reference that is no model",
        lambda tmp: {"algorithm": {"kl_coef": 0.1, "reference": f"{tmp}/none"}},
        "none does not exist; name a transformers directory or a hub model",
    ),
    (
        "an adapter that is none",
        lambda tmp: {"model": {"lora": {"rank": 4, "adapter": f"{tmp}/none"}}},
        "is no adapter in peft's format: it holds no adapter_model.safetensors",
    ),
    (
        "adapters in vLLM with kept keys and values",
        lambda tmp: {
            "model": {"lora": {"rank": 4}},
            "engine": {"kind": "vllm", "vllm_python": sys.executable, "kv_on_swap": "keep"},
            "run": {"deterministic": False},
        },
        "model.lora.rank = 4 gives vLLM another adapter at each swap",
    ),
    (
        "an advantage divided by a deviation without a baseline",
        lambda tmp: {"algorithm": {"preset": "areal", "normalise": "group"}},
        "algorithm.preset = areal with algorithm.baseline = none excludes normalise = group",
    ),
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
        "engine.kv_tokens = 512 cannot hold two sequences of the context of 512 tokens; raise kv_tokens to 1024",
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
        lambda tmp: {"task": {"train": write(tmp / "rows.jsonl", '{"prompt": "1"}\n{"prompt"\n')}},
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
        lambda tmp: {"task": {"verifier": write(tmp / "broken.py", "import nothing_like_it\n") + ":verify"}},
        "broken.py does not import: ModuleNotFoundError at broken.py:1: No module named 'nothing_like_it'",
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
        "is not a class with `async def run(self, episode)`",
    ),
    (
        "a workflow whose run takes no episode",
        lambda tmp: {"rollout": {"workflow": write(tmp / "w.py", "class W:\n    async def run(self): ...") + ":W"}},
        "w.py:W is not a class with `async def run(self, episode)`",
    ),
    (
        "a function for a workflow",
        lambda tmp: {"rollout": {"workflow": task_of(tmp, "verify")}},
        "missing a required argument: 'task' (a workflow is a class with `async def run(self, episode)`)",
    ),
    (
        "tools without a chat template",
        lambda tmp: {"rollout": {"workflow": "headway.rollout.workflows.tools:ToolUse", "settings": {"tools": []}}},
        "tools:ToolUse needs prompts of chat messages; set task.chat = true",
    ),
    (
        "a verifier of one argument",
        lambda tmp: {"task": {"verifier": write(tmp / "v.py", "def verify(text): return 1.0") + ":verify"}},
        "a verifier is a function (task, text) -> score, and this one takes (text)",
    ),
    (
        "rows whose function raises",
        lambda tmp: {"task": {"train": write(tmp / "r.py", "def rows():\n    return [{}['prompt']]") + ":rows"}},
        "r.py:rows raised KeyError at r.py:2: 'prompt'",
    ),
    (
        "an integer above 64 bits",
        lambda tmp: {
            "task": {
                "train": write(tmp / "rows.jsonl", json.dumps({"prompt": "1+1=", "answer": 10**25})),
                "verifier": task_of(tmp, "verify"),
            }
        },
        "row['answer'] is an integer of more than 64 bits; write it as a string",
    ),
    (
        "memory for one sequence on a CPU",
        lambda tmp: {"engine": {"max_context": 32, "kv_tokens": 64}},
        "engine.kv_tokens = 64 cannot hold two sequences of the context of 32 tokens; raise kv_tokens to 128",
    ),
    (
        "the name that others give the learning rate",
        lambda tmp: {"trainer": {"learning_rate": 1e-5}},
        "unknown key trainer.learning_rate; did you mean trainer.lr?",
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
    assert sentence in refused(path, "--dry-run")
    events = tmp_path / "run" / "events.jsonl"
    assert not events.exists() or not events.read_text()
