"""Tables of runs: what they learned, what they waited for, what they lost to faults. tables.py has the others."""

import statistics
from typing import Any

Record = dict[str, Any]


def table(headings: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def source(record: Record) -> str:
    """Where the numbers of a table come from."""
    hardware = record["hardware"]
    device = hardware.get("gpu") or f"{hardware['cores']} cores of an {hardware['cpu']}"
    return f"`{record['command']}`, {record['date'][:10]}, {device}; [record](RESULTS/{record['file']}.json)."


def learning(record: Record) -> str:
    """Of each arm the held-out accuracy at the steps at which all runs were evaluated, and how stale its data was."""
    runs = record["runs"]
    shared = sorted(set.intersection(*({point[0] for point in run["accuracies"]} for run in runs)))
    rows = []
    for arm, found in record["figures"].items():
        own = [{point[0]: point[2] for point in run["accuracies"]} for run in runs if run["arm"] == arm]
        cells = [_mean_and_range([accuracies[step] for accuracies in own]) for step in shared[1:]]
        numbers = [f"{found[name]:.2f}" for name in ("effective_sample_size", "behaviour_kl")]
        rows.append([_shown(arm), str(len(own)), *cells, f"{found['staleness_mean']:.1f}", *numbers])
    steps = [f"after {step} steps" for step in shared[1:]]
    figures = ["mean staleness", "effective sample size", "KL(behaviour‖proximal)"]
    before = _mean_and_range([run["accuracies"][0][2] for run in runs])
    load = record["hardware"]["load_average"][0]
    note = f"Before training {before}. The load average was {load:g} on {record['hardware']['cores']} cores."
    return table(["", "seeds", *steps, *figures], rows) + f"\n\n{note} {source(record)}"


def _shown(arm: str) -> str:
    return arm.replace("eta=", "η = ").replace("eta ", "η ")


def _mean_and_range(shares: list[float]) -> str:
    text = f"{statistics.mean(shares):.1%}"
    return f"{text} ({min(shares):.1%} to {max(shares):.1%})" if max(shares) > min(shares) else text


def learning_real(record: Record) -> str:
    """Accuracy on whole held-out splits before and after training, greedily and by the mean of several samples."""
    columns = [(way, task) for way, tasks in record["before"].items() for task in tasks]

    def cells(measured: list[Record]) -> list[str]:
        return [_mean_and_range([one[way][task]["accuracy"] for one in measured]) for way, task in columns]

    rows = [["before training", "", *cells([record["before"]]), "", "", ""]]
    for arm in record["figures"]:
        own = [run for run in record["runs"] if run["arm"] == arm and "after" in run]
        if own:
            minutes, steps = (statistics.mean(run[name] for run in own) for name in ("wall_s", "steps"))
            speed = statistics.mean(run["tokens_per_s"] for run in own)
            figures = [f"{minutes / 60:.1f}", f"{steps:.0f}", f"{speed:,.0f}"]
            rows.append([_shown(arm), str(len(own)), *cells([run["after"] for run in own]), *figures])
    names = [f"{task}, {way} ({record['before'][way][task]['num']:,})" for way, task in columns]
    return table(["", "seeds", *names, "minutes", "steps", "tokens/s"], rows) + f"\n\n{source(record)}"


def recovery(record: Record) -> str:
    rows = []
    for one in record["repetitions"]:
        weights = "equal" if one["num_retrained"] else ""
        if one["num_differing"]:
            norm = "unknown" if one["relative_norm"] is None else f"{one['relative_norm']:.0e}"
            weights = f"{one['num_differing']} differ by up to {norm}"
        how = "`--resume`" if one["resumed"] else "itself"
        cells = [str(one["step"]), f"{one['seconds']:.1f}", how, str(one["num_retrained"]), weights]
        rows.append([one["victim"], *cells])
    headings = ["killed", "at step", "s to the next new step", "by", "steps retrained", "their weights"]
    figures = record["figures"]
    ended = "reached" if figures["finished"] else "did not reach"
    note = f"The run {ended} its last step; its median step took {figures['median_step_s']:.1f} s."
    return table(headings, rows) + f"\n\n{note} {source(record)}"


def waits(record: Record) -> str:
    """What a run of `headway bench real_run` lost to starting, saving and evaluating."""
    found = record["figures"]
    started = found["summary"]["startup"]
    stalls = [f"{each['stall_s']:.2f} s at version {each['version']}" for each in found["checkpoints"]]
    rows = [["start-up, to the end of the first step", f"{started['in all']:.1f} s"]]
    rows.append(["training stalled for checkpoints", ", ".join(stalls) or "none"])
    for each in found["evaluations"]:
        versions = f"versions {each['version']} to {each['version_last']}"
        rows.append([f"evaluation {each['label']}, {each['num']} problems", f"{each['seconds']:.1f} s, {versions}"])
    return table(["", ""], rows) + f"\n\n{source(record)}"


def lora(record: Record) -> str:
    rows = []
    for name, one in record["repetitions"].items():
        memory = [f"{one[key]:.1f}" for key in ("held_gib", "peak_gib")]
        rest = [f"{min(one['seconds']):.2f}", f"{one['update_bytes'] / 2**20:,.1f}"]
        rows.append([name, f"{one['trained_parameters']:,}", *memory, *rest])
    headings = ["trained", "parameters", "GiB held", "GiB at the peak", "s a step", "MiB an update"]
    ratio = f"The peak is {record['figures']['peak_ratio']:.2f} of that of training all weights."
    return table(headings, rows) + f"\n\n{ratio} {source(record)}"


def trl_grpo(record: Record) -> str:
    rows = [
        [name, f"{one['seconds_a_step']:.2f}", f"{one['tokens_per_s']:,.0f}", f"{one['reward_last']:.3f}"]
        for name, one in record["figures"].items()
    ]
    headings = ["", "s a step", "sampled tokens/s", "reward, last 5 steps"]
    return table(headings, rows) + f"\n\n{source(record)}"
