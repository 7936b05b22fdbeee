"""The documents' tables, made from the records in docs/results/: no measured number is typed by hand.

    python docs/tables.py          rewrite the tables
    python docs/tables.py --check  fail if a document differs from what its records say

A document holds a table between `<!-- table: NAME -->` and `<!-- end -->`, where NAME is a record and a function here;
or `<!-- table: NAME of RECORD -->` where they have different names. `goals` and `real_runs` are made of several.
"""

import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from run_tables import Record, learning, learning_real, lora, recovery, source, table, trl_grpo, waits

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
DOCUMENTS = (
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in ("performance", "learning", "scaling", "fault-tolerance", "tasks", "verifiers", "viewer", "vllm")
    ),
)
_TABLE = re.compile(r"(<!-- table: (\w+)(?: of (\w+))? -->\n).*?(<!-- end -->)", re.DOTALL)


def engine(record: Record) -> str:
    figures = record["figures"]
    rows = [
        [name, *(f"{speed[kind]:.0f}" for kind in ("best", "median", "worst"))]
        for name, speed in figures["tokens_per_s"].items()
    ]
    ratios = ", ".join(f"{by_dtype['any dtype']:.2f}× {opponent}" for opponent, by_dtype in figures["ratios"].items())
    return table(["tokens/s", "best", "median", "worst"], rows) + f"\n\nBest against best: {ratios}. {source(record)}"


def async_(record: Record) -> str:
    figures = record["figures"]
    pairs = figures["ratios_of_pairs"]
    text = f"{figures['ratio']:.2f}×, pairs from {min(pairs):.2f}× to {max(pairs):.2f}×"
    bound = max(record["repetitions"], key=lambda name: int(name.split()[-1]))
    rows = [[f"wall time, η = 0 over {bound}", text], ["tokens/s", f"{figures['ratio_of_tokens_per_s']:.2f}×"]]
    return table(["asynchronous against synchronous", "ratio"], rows) + f"\n\n{source(record)}"


def controller(record: Record) -> str:
    entries = {f"{int(number):,} in flight": entry for number, entry in record["figures"].items()}
    for number, entry in record.get("by_engines", {}).items():
        engines = "1 engine that takes its time" if number == "1" else f"{int(number):,} engines that take their time"
        entries[engines] = entry
    rows = []
    for name, entry in entries.items():
        cost, medians = entry["cpu_us_per_group"], entry["medians"]
        rest = [f"{medians['messages_per_s']:,.0f}", f"{medians['mib']:,.0f}"]
        rows.append([name, *(f"{cost[kind]:.0f}" for kind in ("best", "median", "worst")), *rest])
    headings = ["groups", "µs of the controller a group, best", "median", "worst", "messages/s", "MiB"]
    return table(headings, rows) + f"\n\n{source(record)}"


def failover(record: Record) -> str:
    rows = [
        [f"{how} ({found['num']})", f"{1000 * found['median_s']:.0f}", f"{1000 * found['max_s']:.0f}"]
        for how, found in record["figures"].items()
    ]
    return table(["engines", "median ms", "longest"], rows) + f"\n\n{source(record)}"


def chaos(record: Record) -> str:
    played = record["repetitions"]
    rows = []
    for runtime, engine in dict.fromkeys((one["runtime"], one["engine"]) for one in played):
        own = [one for one in played if (one["runtime"], one["engine"]) == (runtime, engine)]
        ended = sum("resumed" in one["outcome"] for one in own)
        counts = [len(own), sum(one["passed"] for one in own), len(own) - ended, ended]
        rows.append([runtime, engine, ", ".join(sorted({one["victim"] for one in own})), *map(str, counts)])
    headings = ["runtime", "engine", "hit", "scenarios", "nothing lost", "went on", "ended or killed, resumed"]
    return table(headings, rows) + f"\n\n{_continued(played)}\n\n{source(record)}"


def _continued(played: list[Record]) -> str:
    """From a fault of an engine to its requests running on another."""
    rows = []
    for fault in sorted({one["fault"] for one in played}):
        own = [one for one in played if one["fault"] == fault and one["engines"] > 1]
        seconds = [some for one in own for some in one["continued_s"]]
        if seconds:
            rows.append([fault, str(len(seconds)), f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}"])
    return table(["an engine's fault", "requests that went on elsewhere", "median s", "longest"], rows)


def weights(record: Record) -> str:
    rows = []
    for name, found in record["figures"].items():
        pause, proved = "", ""
        if "pause_ms" in found:
            pause = f"{found['pause_ms']['median']:.1f} / {found['pause_ms']['best']:.1f}"
            proved = f"{found['bytes_per_s_proved']['best'] / 1e9:.2f}"
        speeds = [f"{found['bytes_per_s']['best'] / 1e9:.2f}", f"{found['share_of_memcpy']:.0%}", proved]
        tokens = f"{found['before']['tokens_per_s']:,.0f} / {found['during']['tokens_per_s']:,.0f}"
        rows.append([name, *speeds, tokens, pause])
    headings = ["transport", "GB/s", "of memcpy", "with its proof", "tokens/s before / during", "pause ms median / max"]
    return table(headings, rows) + f"\n\n{source(record)}"


def engine_gpu(record: Record) -> str:
    rows = []
    for name, entry in record["figures"].items():
        for system, speed in entry["tokens_per_s"].items():
            over = entry["headway_over"].get(system)
            share = f"{entry['roofline_share']:.0%}" if system == "headway" and "roofline_share" in entry else ""
            ratio = f"{over:.2f}×" if over else ""
            rows.append([name, system, f"{speed['best']:,.0f}", f"{speed['median']:,.0f}", ratio, share])
    headings = ["requests × tokens", "system", "best tokens/s", "median", "Headway over it", "of the roofline"]
    return table(headings, rows) + f"\n\n{source(record)}"


def trainer(record: Record) -> str:
    rows = []
    for name in ("headway", "transformers"):
        if name in record["figures"]:
            speed = record["figures"][name]
            rows.append([name, *(f"{speed[kind]:.0f}" for kind in ("best", "median", "worst"))])
    return table(["TFLOP/s", "best", "median", "worst"], rows) + f"\n\n{source(record)}"


_SPEEDS = ("effective tokens/s", "generated meanwhile")


def async_gpu(record: Record) -> str:
    kept = [item for item in record["repetitions"] if item["kv"] == "keep"]
    kinds = list(dict.fromkeys((item["size"], item["lengths"]) for item in kept))
    rows = []
    for item in sorted(kept, key=lambda item: (kinds.index((item["size"], item["lengths"])), item["eta"])):
        base = next((other for other in kept if other["eta"] == 0 and _alike(other, item)), None)
        speed = base["tokens_per_s"] if base else float("nan")
        ceiling = f"{item['ceiling'] / speed:.2f}×" if "ceiling" in item else ""
        times = [f"{item['wall_s'] / item['steps']:.1f}", f"{item['train_s']:.1f}"]
        age = f"{item['staleness_mean']:.1f} / {item['staleness_max']}"
        numbers = [*_speeds(item), f"{item['tokens_per_s'] / speed:.2f}×", ceiling, *times, age]
        rows.append([item["size"], item["lengths"], str(item["eta"]), *numbers])
    headings = ["batch", "lengths", "η", *_SPEEDS, "against η = 0", "ceiling", "s a step", "of it training"]
    return table([*headings, "staleness mean / max"], rows) + f"\n\n{source(record)}"


def _speeds(item: Record) -> list[str]:
    return [f"{item['tokens_per_s']:,.0f}", f"{item['generated_per_s']:,.0f}"]


def _alike(one: Record, other: Record) -> bool:
    return bool(one["size"] == other["size"] and one["lengths"] == other["lengths"])


def interrupt(record: Record) -> str:
    drained = next(item for item in record["repetitions"] if item["kv"] == "drain")
    rows = []
    for item in record["repetitions"]:
        if not _alike(item, drained) or item["eta"] != drained["eta"]:
            continue
        pauses = f"{item['pause_ms']['mean']:.1f} / {item['pause_ms']['max']:.1f}"
        ratio = f"{item['tokens_per_s'] / drained['tokens_per_s']:.2f}×"
        rows.append([item["kv"], *_speeds(item), ratio, pauses, f"{item['staleness_mean']:.1f}"])
    headings = ["at a swap", *_SPEEDS, "against draining", "pause ms mean / max", "mean staleness"]
    return table(headings, rows) + f"\n\n{source(record)}"


def colocation(record: Record) -> str:
    rows = [
        [name, f"{item['shares']['engine']:.0%}", f"{item['shares']['trainer']:.0%}", f"{item['sum']:.2f}"]
        for name, item in record["repetitions"].items()
    ]
    headings = ["arrangement", "the engine keeps of its speed", "the trainer keeps", "sum"]
    return table(headings, rows) + f"\n\n{source(record)}"


def packing(record: Record) -> str:
    rows = []
    for name, arm in record["repetitions"].items():
        ratio = record["figures"]["ratio_to_fixed"].get(name)
        shape = [str(arm["num_micro_batches"]), f"{arm['fill']:.0%}"]
        rows.append([name, f"{max(arm['tflops']):.0f}", f"{ratio:.3f}×" if ratio else "", *shape])
    headings = ["packing", "TFLOP/s", "against fixed", "micro-batches", "filled"]
    return table(headings, rows) + f"\n\n{source(record)}"


def swap(record: Record) -> str:
    rows = []
    for kv, measured in record["repetitions"].items():
        pauses = sorted(found["pause_ms"] for found in measured["swaps"])
        recomputed = sum(found["recomputed"] for found in measured["swaps"]) / len(measured["swaps"])
        gap = measured["logprob_gap"]
        numbers = [f"{pauses[len(pauses) // 2]:.1f}", f"{pauses[-1]:.1f}", f"{recomputed:,.0f}"]
        rows.append([kv, *numbers, f"{gap['mean']:.3f} / {gap['max']:.2f}"])
    headings = ["at a swap", "pause ms, median", "longest", "tokens recomputed", "log-prob gap after it, mean / max"]
    return table(headings, rows) + f"\n\n{source(record)}"


def profile_gpu(record: Record) -> str:
    found = record["repetitions"]
    kinds = sorted({kind for item in found.values() for kind in item["profile"]["seconds"]})
    rows = []
    for kind in kinds:
        cells = []
        for item in found.values():
            steps = item["profile"]["tokens"] / item["requests"]
            cells.append(f"{1000 * item['profile']['seconds'].get(kind, 0.0) / steps:.2f}")
        rows.append([kind, *cells])
    rows.append(["a step", *(f"{item['step_ms']:.2f}" for item in found.values())])
    return table(["ms a step", *found], rows) + f"\n\n{source(record)}"


def parity(record: Record) -> str:
    rows = [
        [name, f"{item['mean_abs']:.1e}", f"{item['max_abs']:.3f}", f"{item['kl']:.1e}", f"{item['num_tokens']:,}"]
        for name, item in record["repetitions"].items()
    ]
    headings = ["type", "mean \\|Δ log-prob\\|", "max", "KL(engine‖trainer) a token", "tokens"]
    return table(headings, rows) + f"\n\n{source(record)}"


def real_run(record: Record) -> str:
    found = record["figures"]
    summary, gpu = found["summary"], found["gpu"]
    accuracies = ", ".join(f"{share:.1%} at step {step}" for step, share, _ in found["accuracies"])
    rows = [
        ["training steps", f"{summary['steps']} in {summary['wall_s'] / 60:.1f} minutes"],
        ["held-out accuracy", f"{accuracies} ({found['accuracies'][0][2]} rows, greedy)"],
        ["reward, first and last tenth", f"{summary['reward_first']:.3f} → {summary['reward_last']:.3f}"],
        ["tokens trained a second", f"{found['tokens_per_s']:,.0f}"],
        ["goodput: of the tokens generated, trained", f"{summary['goodput']:.1%}"],
        ["staleness", f"mean {summary['staleness_mean']:.2f}, max {summary['staleness_max']}"],
        ["engine busy, trainer busy", f"{summary['engine_busy_share']:.0%}, {summary['trainer_busy_share']:.0%}"],
        *(
            [["GPU busy by its own account", f"{gpu['utilization_percent']:.0f}%, {gpu['power_w']:.0f} W"]]
            if gpu
            else []
        ),
        ["log-prob of a sampled token, engine against trainer", f"{summary['sampled_gap_max_abs']:.2f} at most"],
        ["pause for new weights", f"mean {summary['pause_ms_mean']:.0f} ms, max {summary['pause_ms_max']:.0f} ms"],
    ]
    return table(["", ""], rows) + f"\n\n{source(record)}"


def real_runs() -> str:
    """The same run at several bounds, over the steps that they have in common."""
    others = {"real_sync": "", "real_eta2": "", "real_run": "", "real_engine": ", the engine's host side as it is now"}
    rows = []
    for name, note in others.items():
        record = load(name)
        steps, bound = record["figures"]["steps"], re.search(r"max_staleness=(\d+)", record["command"])
        assert bound is not None
        cells = [*_over(steps, 8, 15), *_over(steps, 21, 90)]
        rows.append([f"[η = {bound[1]}](RESULTS/{name}.json){note}", *cells])
    kinds = ["s a step", "of it waiting", "tokens/s", "reward"]
    return table(["", *(f"{kind}, {which}" for which in ("8th to 15th", "21st to 90th") for kind in kinds)], rows)


def _over(steps: list[list[float]], first: int, last: int) -> list[str]:
    """Seconds a step, seconds waited for a batch, tokens a second and reward, from one step to another."""
    if len(steps) < last:
        return [""] * 4
    seconds = steps[last - 1][0] - steps[first - 2][0]
    chosen = steps[first - 1 : last]
    waited, rewards = (statistics.mean(step[place] for step in chosen) for place in (2, 4))
    tokens = sum(step[3] for step in chosen)
    return [f"{seconds / len(chosen):.2f}", f"{waited:.2f}", f"{tokens / seconds:,.0f}", f"{rewards:.3f}"]


def load(name: str) -> Record:
    return {**json.loads((RESULTS / f"{name}.json").read_text()), "file": name}


def goals() -> str:
    """The goals on one H200, and what the records have."""
    rows = [_goal_of_engine(*goal) for goal in ((64, 20_000, 0), (256, 60_000, 2), (1024, 80_000, 4))]
    small = load("engine_smollm2")["figures"]["1024 × 512"]["tokens_per_s"]["headway"]["best"]
    rows.append(["the same with SmolLM2-135M's shape, tokens/s", "150,000", f"{small:,.0f}", _met(small >= 150_000)])
    speed = load("trainer")["figures"]["headway"]["best"]
    rows.append(["a training step, TFLOP/s", "400", f"{speed:.0f}", _met(speed >= 400)])
    packed = load("packing")["figures"]["ratio_to_fixed"]["dynamic, by FLOPs"]
    rows.append(["dynamic micro-batches against fixed ones", "1.06×", f"{packed:.2f}×", _met(packed >= 1.06)])
    rows += [_goal_of_async(*goal) for goal in (("16×8", 2.5), ("16×16", 2.0), ("32×16", 0.0), ("64×16", 1.25))]
    speeds = _long_tailed("async_eta", "16×8")
    ratio = speeds[4, "keep"] / speeds[4, "drain"]
    rows.append(["interruptible against draining", "1.12×", f"{ratio:.2f}×", _met(ratio >= 1.12)])
    pause = max(load("swap")["figures"]["keep"]["pause_ms"])
    rows.append(["pause for new weights of 1.5B, ms", "at most 50", f"{pause:.1f}", _met(pause <= 50)])
    kl = load("parity")["repetitions"]["bfloat16"]["kl"]
    rows.append(["KL(engine‖trainer) a token, bf16", "below 1e-3", f"{kl:.1e}", _met(kl < 1e-3)])
    return table(["on one H200", "wanted", "seen", ""], rows)


def _goal_of_engine(num: int, wanted: float, over: float) -> list[str]:
    found = load("engine_gpu")["figures"][f"{num} × 512"]
    speed, ratio = found["tokens_per_s"]["headway"]["best"], found["headway_over"]["vllm"]
    asked = f"{wanted:,.0f}" + (f", {over:g}× vLLM" if over else "")
    met = _met(speed >= wanted and ratio >= over)
    return [f"the engine at {num:,} requests, tokens/s", asked, f"{speed:,.0f}, {ratio:.2f}× vLLM", met]


def _goal_of_async(size: str, wanted: float) -> list[str]:
    found = [_long_tailed(name, size) for name in ("async_gpu", "async_eta", "async_large", "async_32")]
    ratios = [speeds[4, "keep"] / speeds[0, "keep"] for speeds in found if speeds]
    seen = " and ".join(f"{ratio:.2f}×" for ratio in ratios) or "not measured yet"
    met = _met(min(ratios) >= wanted) if ratios else ""
    return [f"η = 4 against η = 0, {size}", f"{wanted:g}×" if wanted else "", seen, met]


def _long_tailed(name: str, size: str) -> dict[tuple[int, str], float]:
    """Effective tokens/s by η and what happens at a swap, of the arms of this size with long-tailed lengths."""
    arms = [arm for arm in load(name)["repetitions"] if arm["size"] == size and "16384 at most" in arm["lengths"]]
    return {(arm["eta"], arm["kv"]): arm["tokens_per_s"] for arm in arms}


def _met(yes: bool) -> str:
    return "" if yes else "missed"


def viewer(record: Record) -> str:
    figures = record["figures"]
    rows = [["from the command to the page", f"{1000 * figures['command_to_page_s']:,.0f}", ""]]
    rows += [
        [name, f"{statistics.median(times):.0f}", f"{max(times):.0f}"] for name, times in figures["queries_ms"].items()
    ]
    size = f"{figures['steps']:,} steps, {figures['trajectories']:,} trajectories"
    return table([size, "ms, median", "worst"], rows) + f"\n\n{source(record)}"


def viewer_live(record: Record) -> str:
    live = record["figures"]["live"]
    shares = [f"{live['viewer_cpu_s']:.2f} s in {live['watched_s']:.0f} s", f"{live['share_of_all_cores']:.2%}"]
    heads = ["a live run with the page open", "CPU time of the viewer", "of the machine's"]
    return table(heads, [[f"`{live['config']}`", *shares]]) + f"\n\n{source(record)}"


def verifiers(record: Record) -> str:
    rows = []
    for name in ("math_answer", "code"):
        found = record["figures"][name]
        used = found["processor_ms_per_verdict"]
        speeds = [f"{found[key]:.1f}" for key in ("verdicts_per_s", "median_ms", "p99_ms")]
        free = [f"{used:.1f}", f"{2000 / used:.0f}"] if used else ["", ""]
        rows.append([name, *speeds, *free, f"{found['hanging_text']['seconds']:.1f}"])
    mbpp, load = record["figures"]["mbpp"], record["hardware"]["load_average"][0]
    headings = [
        "verifier",
        "verdicts/s",
        "median ms",
        "p99 ms",
        "processor ms a verdict",
        "2 free cores could",
        "a hang, s",
    ]
    solutions = (
        f"Of MBPP's {mbpp['solutions']} reference solutions {mbpp['passed']} pass, and {mbpp['negated_failed']} fail "
        f"with their first assert negated. The load average was {load:g} on {record['hardware']['cores']} cores when "
        "it began, other work included; the last rate is what processor time alone allows."
    )
    return table(headings, rows) + f"\n\n{solutions}\n\n{source(record)}"


def verifiers_math(record: Record) -> str:
    rows = []
    for name, found in record["figures"]["math"].items():
        for kind, count in found["questions"].items():
            asked = count["asked"]
            shares = [f"{count[key]} ({count[key] / asked:.2%})" for key in ("headway_wrong", "math_verify_wrong")]
            rows.append([name, kind, str(asked), *shares])
    return table(["split", "written as", "asked", "Headway wrong", "math-verify wrong"], rows) + f"\n\n{source(record)}"


def examples(record: Record) -> str:
    rows = []
    for name, found in record["figures"].items():
        first, last = (_with_interval(found["evaluations"][end]) for end in (0, -1))
        rewards = [f"{statistics.fmean(part):.2f}" for part in (found["reward"][:5], found["reward"][-5:])]
        used = [str(len(found["steps"])), f"{found['training_s'] / 60:.1f}"]
        rows.append([f"`configs/{name}.toml`", first, last, *rewards, *used])
    headings = ["", "held out before", "after", "reward, first 5 steps", "last 5", "steps", "minutes"]
    load = record["hardware"]["load_average"][0]
    note = f"The load average was {load:.0f}: other work took most of the processor." if load > 4 else ""
    return table(headings, rows) + f"\n\n{note} {source(record)}"


def _with_interval(found: Record) -> str:
    low, high = found["interval"]
    return f"{found['accuracy']:.2f} ({low:.2f}–{high:.2f})"


def evaluation(record: Record) -> str:
    rows = []
    for name, found in record["figures"].items():
        equal, problems = found["equal"], found["problems"]
        right = [f"{found[who]:g}" for who in ("headway", "transformers")]
        rows.append([name, str(problems), f"{equal} ({equal / problems:.1%})", str(found["tokens"]), *right])
    headings = ["benchmark", "problems", "equal token for token", "tokens", "right: Headway", "right: transformers"]
    return table(headings, rows) + f"\n\n{source(record)}"


OF_SEVERAL: dict[str, Callable[[], str]] = {"goals": goals, "real_runs": real_runs}
RENDERERS: dict[str, Callable[[Record], str]] = {
    "engine": engine,
    "async": async_,
    "controller": controller,
    "failover": failover,
    "chaos": chaos,
    "weights": weights,
    "engine_gpu": engine_gpu,
    "trainer": trainer,
    "async_gpu": async_gpu,
    "interrupt": interrupt,
    "colocation": colocation,
    "packing": packing,
    "swap": swap,
    "profile_gpu": profile_gpu,
    "parity": parity,
    "real_run": real_run,
    "learning": learning,
    "learning_real": learning_real,
    "recovery": recovery,
    "waits": waits,
    "lora": lora,
    "trl_grpo": trl_grpo,
    "verifiers": verifiers,
    "viewer": viewer,
    "viewer_live": viewer_live,
    "verifiers_math": verifiers_math,
    "examples": examples,
    "evaluation": evaluation,
}


def rendered(document: Path) -> str:
    """The document with its tables as the records have them."""

    def replace(found: re.Match[str]) -> str:
        results = RESULTS.relative_to(document.parent).as_posix()
        several = OF_SEVERAL.get(found[2])
        text = several() if several else RENDERERS[found[2]](load(found[3] or found[2]))
        return found[1] + text.replace("RESULTS", results) + "\n" + found[4]

    return _TABLE.sub(replace, document.read_text())


def main() -> None:
    stale = [document for document in DOCUMENTS if document.exists() and rendered(document) != document.read_text()]
    if "--check" in sys.argv[1:]:
        sys.exit(f"{stale[0].name} differs from its records; run python docs/tables.py" if stale else 0)
    for document in stale:
        document.write_text(rendered(document))


if __name__ == "__main__":
    main()
