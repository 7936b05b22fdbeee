"""The documents' pictures, made from the records in docs/results/.

python docs/pictures.py          draw them all
"""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
BENCH = RESULTS.parents[1] / "bench"
GENERATING, TRAINING, SWAPPING = "#3b7dd8", "#e08a2c", "#111111"

Record = dict[str, Any]


def gpu_time(record: Record, size: str, out: Path) -> None:
    """Who had the GPU when, at η = 0 and at the largest η of one size of batch, on one clock."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    arms = [item for item in record["repetitions"] if item["size"] == size and item["kv"] == "keep"]
    arms = [min(arms, key=lambda item: item["eta"]), max(arms, key=lambda item: item["eta"])]
    longest = min(item["timeline"]["seconds"] for item in arms)
    most = max(look[1] for item in arms for look in item["timeline"]["engine"])
    figure, rows = pyplot.subplots(2, 1, figsize=(11, 4.6), sharex=True, layout="constrained")
    for axes, item in zip(rows, arms, strict=True):
        _draw(axes, item, longest, most)
    rows[1].set_xlabel("seconds")
    handles, labels = rows[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def _draw(axes: Any, item: Record, longest: float, most: int) -> None:
    timeline = item["timeline"]
    looks = [look for look in timeline["engine"] if look[0] <= longest]
    seconds, running = [look[0] for look in looks], [look[1] / most for look in looks]
    axes.fill_between(seconds, 0, running, step="pre", color=GENERATING, label="generating (height: sequences)")
    bars = [(start, length) for start, length in timeline["trainer"] if start <= longest]
    axes.broken_barh(bars, (1.12, 0.3), color=TRAINING, label="training")
    swaps = [when for when, _ in timeline["swaps"] if when <= longest]
    axes.vlines(swaps, 0, 1.5, color=SWAPPING, linewidth=1, label="new weights")
    idle = _idle_share(looks, bars, longest)
    speed = f"{item['tokens_per_s']:,.0f} tokens/s trained"
    axes.set_title(f"η = {item['eta']}: {speed}, GPU idle {idle:.0%} of the time", loc="left", fontsize=10)
    axes.set_xlim(0, longest)
    axes.set_ylim(0, 1.5)
    axes.set_yticks([])
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)


def _idle_share(looks: list[Any], bars: list[Any], longest: float) -> float:
    """Of the tenths of seconds in which neither side worked; between two readings the engine was busy for a share."""
    idle = 0.0
    num_slots = int(longest * 10)
    for slot in range(num_slots):
        now = slot / 10
        if any(start <= now < start + length for start, length in bars):
            continue
        look = next((look for look in looks if look[0] >= now), None)
        idle += 1.0 - min(1.0, look[2]) if look else 0.0
    return idle / num_slots


def examples(record: Record, out: Path) -> None:
    """Reward of every training step, and the mean held-out score with its interval, of each example."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures = record["figures"]
    figure, row = pyplot.subplots(1, len(figures), figsize=(12, 3.0), sharey=True, layout="constrained")
    for axes, (name, of) in zip(row, figures.items(), strict=True):
        axes.plot(of["steps"], of["reward"], color=GENERATING, linewidth=1.2, label="reward in training")
        known = [found for found in of["evaluations"] if found["accuracy"] is not None]
        scores, intervals = [found["accuracy"] for found in known], [found["interval"] for found in known]
        margins = [[score - low for score, (low, _) in zip(scores, intervals, strict=True)]]
        margins.append([high - score for score, (_, high) in zip(scores, intervals, strict=True)])
        places = [found["version"] for found in known]
        axes.errorbar(places, scores, margins, color=TRAINING, marker="o", label="held out, 95% interval", capsize=3)
        axes.set_title(f"{name}, {of['training_s'] / 60:.1f} min", fontsize=10)
        axes.set_xlabel("training steps")
        axes.set_ylim(0, 1.05)
        for side in ("right", "top"):
            axes.spines[side].set_visible(False)
    handles, labels = row[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def main() -> None:
    path = RESULTS / "async_gpu.json"
    if path.exists():
        gpu_time(json.loads(path.read_text()), "16×8", RESULTS.parent / "gpu_time.png")
    path = RESULTS / "examples.json"
    if path.exists():
        examples(json.loads(path.read_text()), RESULTS.parent / "examples.png")
    sys.path.insert(0, str(BENCH))
    for path in RESULTS.glob("learning_*.json"):
        draw = runpy.run_path(str(BENCH / "learning.py"))["draw"]
        draw(json.loads(path.read_text())["runs"], RESULTS.parent / f"{path.stem}.png")


if __name__ == "__main__":
    main()
