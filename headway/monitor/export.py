"""`headway export`: a run's model as a directory ready for the Hugging Face hub, and its completions as Parquet."""

import json
import os
import re
import shutil
import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash

from headway import __version__
from headway.errors import CAUSE, HeadwayError, translated
from headway.monitor.reader import RunReader
from headway.monitor.text import figure

CARD_NAME = "README.md"
CONFIG_NAME = "headway_config.json"
_ROWS_AT_ONCE = 2_000
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def export_model(run: RunReader, to: Path) -> int | None:
    """Copy the trained model and write its card; returns the version of its weights, where the record has it."""
    source = run.model_path
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise HeadwayError(f"{to} exists; name a directory that does not, or an empty one")
    partial = to.with_name(to.name + ".partial")
    version = version_of(run, source)
    with translated(OSError, HeadwayError, f"cannot write {to}: {CAUSE}; choose another place for it"):
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source, partial)
        (partial / CARD_NAME).write_text(model_card(run, version), encoding="utf-8")
        (partial / CONFIG_NAME).write_text(json.dumps(run.config, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, to)
    return version


def version_of(run: RunReader, model: Path) -> int | None:
    """The version whose recorded digest the model's weights have.

    None where the digest was made otherwise: on a GPU, or of pieces by several trainer ranks.
    """
    found = {name: checksum for file in sorted(model.glob("*.safetensors")) for name, checksum in _checksums(file)}
    if (head := found.get("model.embed_tokens.weight")) is not None:
        found.setdefault("lm_head.weight", head)  # tied: published, and not saved
    lines = "\n".join(f"{name} {found[name]}" for name in sorted(found))
    digest = xxhash.xxh3_64_hexdigest(lines.encode())
    return next((version for version, known in run.run.digests.items() if known == digest), None)


def _checksums(path: Path) -> Iterator[tuple[str, str]]:
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        for name, about in header.items():
            if name != "__metadata__":
                start, end = about["data_offsets"]
                file.seek(8 + length + start)
                yield name, xxhash.xxh3_64_hexdigest(file.read(end - start))


def model_card(run: RunReader, version: int | None) -> str:
    """What is known of the model from its record, and nothing else."""
    config, summary = run.config, run.summary
    base = str(config["model"]["path"])
    tasks = config.get("tasks") or {"": config.get("task", {})}
    header: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if _is_of_hub(base):
        header["base_model"] = base
    data = [str(task["train"]) for task in tasks.values() if task.get("train")]
    named = [name.split(":")[1] for name in data if name.startswith("hf:")]
    if hub := [name for name in named if _HUB_NAME.fullmatch(name) and not Path(name).exists()]:
        header["datasets"] = hub
    sizes = config["trainer"]["batch_groups"], config["rollout"]["group_size"]
    header["tags"] = ["headway", "reinforcement-learning"]
    verified = f"{version}, by checksum" if version is not None else "not verified against the record"
    rows = {
        "base model": _code(base),
        "training rows": ", ".join(map(_code, data)) + f" ({run.run.num_prompts:,} prompts)",
        "verifiers": ", ".join(_code(name) for task in tasks.values() for name in _verifiers(task)),
        "training steps of the run": f"{summary.steps:,}",
        "version of these weights": verified,
        "groups per step, trajectories per group": "{}, {}".format(*sizes),
        "staleness bound η": str(config["staleness"]["max_staleness"]),
        "staleness observed, mean and max": f"{figure(summary.staleness_mean)}, {figure(summary.staleness_max)}",
        "learning rate": str(config["trainer"]["lr"]),
        "algorithm": _code(str(config["algorithm"].get("preset") or config["algorithm"].get("objective", ""))),
        "sampling temperature": str(config["sampling"]["temperature"]),
        "tokens generated, trained": f"{summary.tokens_generated:,}, {summary.tokens_trained:,}",
        "held-out accuracy before training": _accuracy(summary.eval_before),
        "held-out accuracy after training": _accuracy(summary.eval_after),
        "held-out problems": f"{summary.eval_num} with a verdict, {summary.eval_num_failed} without",
        "status of the run": f"{run.status}, resumed {summary.resumed} times",
        "Headway": __version__,
    }
    front = [f"{name}: {json.dumps(value)}" for name, value in header.items()]
    table = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]
    title = f"# {_plain(run.directory.resolve().name)}"
    about = f"Trained by asynchronous reinforcement learning with Headway. All knobs: `{CONFIG_NAME}`."
    return "\n".join(["---", *front, "---", "", title, "", about, "", *table, ""])


def _is_of_hub(model: str) -> bool:
    """Whether the model was fetched by this name; one of a local directory may look alike."""
    from huggingface_hub import try_to_load_from_cache

    if not _HUB_NAME.fullmatch(model) or Path(model).exists():
        return False
    return isinstance(try_to_load_from_cache(model, "config.json"), str)


def _verifiers(task: dict[str, Any]) -> list[str]:
    named = task.get("verifiers") or {"": task.get("verifier", "")}
    return [str(reference) for reference in named.values() if reference]


def _accuracy(share: float | None) -> str:
    return "not measured" if share is None else f"{share:.1%}"


def _plain(text: str) -> str:
    """Text on one line without marks that Markdown or HTML would read."""
    return re.sub(r"[`|<>\[\]*_#\\\x00-\x1f]", " ", text).strip()


def _code(text: str) -> str:
    cleaned = re.sub(r"[`|\x00-\x1f]", " ", text)
    return f"`{cleaned}`" if cleaned.strip() else "–"


def export_completions(run: RunReader, path: Path) -> int:
    """Every trajectory of every finished group as one Parquet file; returns how many. Needs pyarrow."""
    with translated(ImportError, HeadwayError, "Parquet needs pyarrow: pip install 'headway-rl[view]'"):
        import pyarrow as arrow
        from pyarrow import parquet
    schema = arrow.schema(_SCHEMA)
    partial, num_rows, rows = path.with_name(path.name + ".partial"), 0, run.rows()
    with translated(OSError, HeadwayError, f"cannot write {path}: {CAUSE}; choose another place for it"):
        with parquet.ParquetWriter(partial, schema) as writer:
            while some := list(islice(rows, _ROWS_AT_ONCE)):
                writer.write_table(arrow.Table.from_pylist(some, schema=schema))
                num_rows += len(some)
        os.replace(partial, path)
    return num_rows


_SCHEMA = [
    *(("group", "int64"), ("prompt_row", "int64"), ("task", "string"), ("step", "int64"), ("state", "string")),
    *(("staleness", "int64"), ("prompt", "string"), ("trajectory", "int64"), ("completion", "string")),
    *(("reward", "float64"), ("components", "string"), ("length", "int64"), ("stop", "string")),
    *(("oldest_version", "int64"), ("newest_version", "int64")),
]
