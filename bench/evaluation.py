"""`headway eval` against a plain transformers loop: the same prompts, greedy, fp32, token for token and by score.

Two benchmarks of a config's form are evaluated by the command itself; `generate` then completes the very prompts in
batches of equal settings, and the same verifiers score what it wrote.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import RESULTS_DIR, Message, Record, versions

if TYPE_CHECKING:
    from headway.config import Config
    from headway.types import Prompt

CONFIG = """
[run]
dir = "{out}"

[model]
path = "{model}"

[task]
chat = true

[tasks.gsm8k]
eval = "{gsm8k}"
prompt_field = "question"
verifier = "headway.tasks.verifiers.number:verify"
suffix = " End with #### and the number."
weight = 0

[tasks.math500]
eval = "{math}"
prompt_field = "problem"
verifier = "headway.tasks.verifiers.math_answer:verify"
suffix = " Put the final answer within \\\\boxed{{}}."
weight = 0

[sampling]
max_tokens = {max_tokens}

[engine]
max_num_seqs = {batch}
max_context = 2048
threads = {threads}

[evaluate]
limit = {limit}
"""


def by_headway(config: Path, folder: Path) -> list[Message]:
    """What the command recorded of every problem."""
    subprocess.run([sys.executable, "-m", "headway.cli", "eval", str(config)], check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (folder / "eval" / "problems.jsonl").read_text().splitlines()]


def by_transformers(config: "Config", prompts: list["Prompt"], options: argparse.Namespace) -> list[list[int]]:
    """The tokens that `generate` gives for each prompt, end-of-text token included."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).eval()
    ends = {tokenizer.eos_token_id, model.config.eos_token_id}
    found: dict[int, list[int]] = {}
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].tokens))
    for start in range(0, len(order), options.batch):
        batch = order[start : start + options.batch]
        inputs = tokenizer.pad({"input_ids": [prompts[i].tokens.tolist() for i in batch]}, return_tensors="pt")
        with torch.inference_mode():
            made = model.generate(**inputs, do_sample=False, max_new_tokens=options.max_tokens)
        for index, row in zip(batch, made[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            stops = [place for place, token in enumerate(row) if token in ends]
            found[index] = row[: stops[0] + 1] if stops else row
    return [found[index] for index in range(len(prompts))]


def compare(config: "Config", prompts: list["Prompt"], ours: list[Message], theirs: list[list[int]]) -> Message:
    """Of each benchmark, the answers that are equal token for token, and both scores."""
    from headway.model.tokenizer import decode, load_tokenizer
    from headway.tasks.scoring import Scorer, specification

    tokenizer, scorer = load_tokenizer(config.model.path), Scorer(specification(config.named_tasks))
    records = {(record["task"], record["row"]): record["completions"][0] for record in ours}
    figures: dict[str, Message] = {}
    for prompt, tokens in zip(prompts, theirs, strict=True):
        of_task = figures.setdefault(
            prompt.source, {"problems": 0, "equal": 0, "headway": 0.0, "transformers": 0.0, "tokens": 0, "differ": []}
        )
        record = records[prompt.source, prompt.index]
        score = scorer.score(prompt.source, prompt.task, decode(tokenizer, tokens))[0]
        of_task["problems"] += 1
        of_task["equal"] += record["tokens"] == tokens
        of_task["tokens"] += len(tokens)
        of_task["headway"] += record["score"]
        of_task["transformers"] += score
        if record["tokens"] != tokens:
            pairs = zip(record["tokens"], tokens, strict=False)
            place = next((at for at, (one, other) in enumerate(pairs) if one != other), -1)
            of_task["differ"].append({"row": prompt.index, "from_token": place, "scores": [record["score"], score]})
    return figures


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headway bench evaluation", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="models/smollm2-135m", help="transformers directory")
    parser.add_argument("--gsm8k", default="data/gsm8k/test.jsonl", help="GSM8K's test problems")
    parser.add_argument("--math", default="data/math/test.jsonl", help="MATH's test problems")
    parser.add_argument("--limit", type=int, default=128, help="problems of each")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest completion")
    parser.add_argument("--batch", type=int, default=32, help="sequences decoded together")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "evaluation.json", help="where the record goes")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    from headway.config import load
    from headway.launch import prepare

    options, record = parse(arguments), Record("evaluation", arguments)
    settings: dict[str, Any] = {name: value for name, value in vars(options).items() if name != "out"}
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "evaluation.toml"
        path.write_text(CONFIG.format(**settings | {"out": scratch}))
        config = load(path)
        ours = by_headway(path, Path(scratch))
        prompts = prepare(config, to_train=False).held_out
        figures = compare(config, prompts, ours, by_transformers(config, prompts, options))
    table = Table("benchmark", "problems", "equal token for token", "Headway", "transformers")
    for name, of in figures.items():
        shares = [f"{of[key] / of['problems']:.1%}" for key in ("equal", "headway", "transformers")]
        table.add_row(name, str(of["problems"]), *shares)
    Console().print(table)
    small = {name: settings[name] for name in ("limit", "max_tokens", "batch", "threads")}
    record.write(options.out, versions=versions("torch", "transformers"), settings=small, figures=figures)


if __name__ == "__main__":
    main(sys.argv[1:])
