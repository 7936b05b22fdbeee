"""The job of a config compared with TRL's GRPOTrainer with vLLM colocated, one after the other on one GPU, in one run.

    headway bench trl_grpo --model models/smollm2-135m --steps 20
    headway bench trl_grpo --model DIR --trl-python OTHER/bin/python       TRL and vLLM in an environment of their own

Both get the same model, questions, verifier, batch (64 questions, 16 completions each), lengths, learning rate and
temperature. TRL gets bf16, vLLM in its own process's memory, and the largest micro-batch that fits (64 for the small
model; `--micro-batch` sets it). Recorded are seconds a step, sampled tokens a second and the mean reward by step,
without each side's first step. Either side is ended after `--minutes`, and its steps until then count; a side that has
been measured is not run again, so the command can be given once more where the first was killed.
"""

import argparse
import contextlib
import json
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import RESULTS_DIR, Message, Record, versions

if TYPE_CHECKING:
    from rich.console import Console

CONFIG = Path("configs/gsm8k.toml")
END_S = 120.0
NUM_PROMPTS, GROUP_SIZE, MAX_TOKENS, MAX_CONTEXT = 64, 16, 320, 1024


def of_trl(options: argparse.Namespace) -> None:
    """Steps of TRL's trainer, in this process: its time, sampled tokens and mean reward, in a file after each."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from headway.tasks.verifiers.number import verify

    rows = [json.loads(line) for line in options.train.read_text().splitlines()]
    asked = [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]
    steps: list[Message] = []

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [float(verify({"answer": right}, text)) for text, right in zip(texts, answer, strict=True)]

    class Steps(TrainerCallback):
        began = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_log(self, *_: Any, logs: Message | None = None, **__: Any) -> None:
            if logs and "reward" in logs:
                tokens = logs["completions/mean_length"] * NUM_PROMPTS * GROUP_SIZE
                seconds = time.perf_counter() - self.began
                steps.append({"seconds": seconds, "tokens": tokens, "reward": logs["reward"]})
                options.measure_trl.write_text(json.dumps(steps))

    arguments = GRPOConfig(
        output_dir=str(options.root / "trl"),
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=NUM_PROMPTS * GROUP_SIZE // options.micro_batch,
        num_generations=GROUP_SIZE,
        max_completion_length=MAX_TOKENS,
        temperature=1.0,
        beta=0.0,
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        max_steps=options.steps,
        bf16=True,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=MAX_CONTEXT,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    GRPOTrainer(str(options.model), reward, arguments, Dataset.from_list(asked), callbacks=[Steps()]).train()


def of_headway(options: argparse.Namespace) -> list[Message]:
    """Training steps of the same job; a step's time is from its end to the end of the one before."""
    from headway.record.run import Run

    run = options.root / "headway"
    command = [sys.executable, "-m", "headway.cli", "train", str(CONFIG), "--overwrite", f"--run.dir={run}"]
    knobs = [
        *(f"--model.path={options.model}", f"--task.train={options.train}", "--task.eval="),
        *(f"--run.steps={options.steps}", f"--trainer.lr={options.lr}", f"--trainer.batch_groups={NUM_PROMPTS}"),
        *(f"--rollout.group_size={GROUP_SIZE}", f"--sampling.max_tokens={MAX_TOKENS}", "--checkpoint.every=100000"),
        f"--engine.max_context={MAX_CONTEXT}",
    ]
    process = subprocess.Popen([*command, *knobs, *options.overrides], stdout=subprocess.DEVNULL)
    try:
        if code := process.wait(60 * options.minutes):
            raise subprocess.CalledProcessError(code, command)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait(END_S)
    found = Run.read(run)
    events, before = [step.event for step in found.steps], found.clock.training()[0][0]
    steps = []
    for event in events:
        steps.append({"seconds": event.time - before, "tokens": event.tokens, "reward": event.reward})
        before = event.time
    return steps


def figures(steps: list[Message]) -> Message:
    later = steps[1:]
    seconds = sum(step["seconds"] for step in later)
    return {
        "seconds_a_step": seconds / len(later),
        "tokens_per_s": sum(step["tokens"] for step in later) / seconds,
        "reward_last": statistics.mean(step["reward"] for step in later[-5:]),
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headway bench trl_grpo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--train", type=Path, default=Path("data/gsm8k/train.jsonl"), help="questions and answers")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=5e-6)
    parser.add_argument("--micro-batch", type=int, default=64, help="completions in a micro-batch of TRL's")
    parser.add_argument("--minutes", type=float, default=8.0, help="either side is ended after so long")
    parser.add_argument("--trl-python", default=sys.executable, help="an interpreter that has trl and vllm")
    parser.add_argument("--root", type=Path, default=Path("runs/trl_grpo"))
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "trl_grpo.json", help="where the record goes")
    parser.add_argument("--measure-trl", type=Path, help="run TRL's side in this process, its steps to this file")
    options, overrides = parser.parse_known_args(arguments)
    options.overrides = overrides
    return options


def show(found: Message, console: "Console") -> None:
    from rich.table import Table

    table = Table("", "s a step", "sampled tokens/s", "reward, last 5 steps")
    for name, one in found.items():
        table.add_row(name, f"{one['seconds_a_step']:.2f}", f"{one['tokens_per_s']:,.0f}", f"{one['reward_last']:.3f}")
    console.print(table)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    if options.measure_trl is not None:
        of_trl(options)
        return
    from rich.console import Console

    record = Record("trl_grpo", arguments)
    options.root.mkdir(parents=True, exist_ok=True)
    told = {name: options.root / f"{name}.json" for name in ("headway", "trl")}
    if not told["headway"].is_file():
        told["headway"].write_text(json.dumps(of_headway(options)))
    if not told["trl"].is_file():
        growing = options.root / "trl.part.json"
        command = [options.trl_python, __file__, *arguments, f"--measure-trl={growing}"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60 * options.minutes)
        growing.rename(told["trl"])
    steps = {name: json.loads(path.read_text()) for name, path in told.items()}
    found = {name: figures(one) for name, one in steps.items()}
    record.write(options.out, versions=versions("torch", "transformers", "trl", "vllm"), figures=found, steps=steps)
    show(found, Console())
    print(f"written to {options.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
