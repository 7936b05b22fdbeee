"""`headway init`: a first config for a task and a model, each knob with its sentence."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.config import all_keys, load
from headway.errors import CAUSE, ConfigError, translated

Sections = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Starter:
    """What a kind of task sets; `module` is the source of a task file that is written next to the config."""

    about: str
    task: dict[str, Any]
    sections: Sections = field(default_factory=dict)
    module: str = ""


_OWN = '''"""Your task: rows with a prompt, and a function that scores what the model wrote."""

from headway.tasks.verifiers import verifier


def rows():
    return [{"prompt": f"What is {a} + {b}?", "answer": a + b} for a in range(20) for b in range(20)]


@verifier(needs=("answer",))
def verify(task, text):
    """`task` is the row. Return a number, or a dict of named numbers."""
    return float(str(task["answer"]) in text.split())
'''

STARTERS: dict[str, Starter] = {
    "own": Starter("a Python file with your rows and your verifier", {}, module=_OWN),
    "math": Starter(
        "GSM8K from the hub, judged by the final number",
        {
            "train": "hf:openai/gsm8k:main@train",
            "eval": "hf:openai/gsm8k:main@test",
            "prompt_field": "question",
            "suffix": "\nThink step by step and give the answer after ####.",
            "verifier": "headway.tasks.verifiers.number:verify",
        },
        {"sampling": {"max_tokens": 512}},
    ),
    "code": Starter(
        "rows with a prompt and a test_list, judged by running the program in the sandbox",
        {"train": "data/train.jsonl", "eval_share": 0.1, "verifier": "headway.tasks.verifiers.code:verify"},
        {"sampling": {"max_tokens": 512}, "reward": {"workers": 2}},
    ),
    "choice": Starter(
        "rows with a prompt and an answer that is a letter",
        {"train": "data/train.jsonl", "eval_share": 0.1, "verifier": "headway.tasks.verifiers.choice:verify"},
    ),
}
_GPU: Sections = {
    "model": {"dtype": "bfloat16"},
    "engine": {"device": "cuda", "max_num_seqs": 256},
    "trainer": {"device": "cuda"},
}


def write_starter(path: Path, task: str, model: str, gpu: bool) -> list[Path]:
    """Write the config, and the task file where the kind has one; returns what was written."""
    if task not in STARTERS:
        raise ConfigError(f"--task {task} is not known; choose {', '.join(STARTERS)}")
    if path.suffix != ".toml":
        raise ConfigError(f"{path} is not the name of a TOML file; write {path.with_suffix('.toml')}")
    starter, module = STARTERS[task], path.with_name(f"{path.stem.replace('-', '_')}_task.py")
    files = {path: config_text(starter, module, model, gpu)} | ({module: starter.module} if starter.module else {})
    for file in files:
        if file.exists():
            raise ConfigError(f"{file} exists; name another file")
    with translated(OSError, ConfigError, f"cannot write {path}: {CAUSE}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            file.write_text(text, encoding="utf-8")
    load(path)  # a model's name can hold what no config may
    return list(files)


def config_text(starter: Starter, module: Path, model: str, gpu: bool) -> str:
    own = {"train": f"{module}:rows", "eval_share": 0.1, "verifier": f"{module}:verify"} if starter.module else {}
    sections: Sections = {
        "run": {"steps": 100},
        "model": {"path": model},
        "task": {**starter.task, **own, "chat": True},
        "sampling": {"max_tokens": 256},
        "rollout": {"group_size": 8},
        "staleness": {"max_staleness": 4},
        "trainer": {"batch_groups": 16, "lr": 1e-6},
        "evaluate": {"every": 20, "limit": 200},
        "metrics": {"samples_every": 10},
    }
    for added in (starter.sections, _GPU if gpu else {}):
        for name, knobs in added.items():
            sections[name] = sections.get(name, {}) | knobs
    sentences = all_keys()
    lines = [f"# {starter.about[0].upper()}{starter.about[1:]}. `headway train FILE --dry-run` checks it;"]
    lines.append("# `headway knobs` lists every other knob.")
    for name, knobs in sections.items():
        lines += ["", f"[{name}]"]
        for knob, value in knobs.items():
            lines += [f"# {sentences[f'{name}.{knob}']}", f"{knob} = {json.dumps(value, ensure_ascii=False)}"]
    return "\n".join(lines) + "\n"
