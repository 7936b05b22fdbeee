"""How weights travel in a run: chosen for where its workers are, and the same weights by every way."""

from pathlib import Path
from typing import Any

import pytest
from system import HeadwayProcess, check_finished, events_of, make_config, run_inline, write_config

from headway.config import Config, load, validate
from headway.control.workers import resolve_transport
from headway.errors import ConfigError


def config_of(weights: dict[str, str], device: str = "cpu") -> Config:
    sections: dict[str, Any] = {"engine": {"device": device}, "trainer": {"device": device}, "weights": weights}
    task = {"train": "rows.jsonl", "verifier": "number"}
    return validate({"run": {"dir": "runs/one"}, "model": {"path": "model"}, "task": task, **sections})


@pytest.mark.parametrize(
    ("transport", "device", "num_machines", "chosen"),
    [
        ("auto", "cpu", 1, ("shared_memory",)),
        ("auto", "cuda", 1, ("cuda",)),
        ("auto", "cpu", 3, ("shared_memory", "stream")),
        ("auto", "cuda", 3, ("shared_memory", "stream")),
        ("stream", "cuda", 1, ("stream",)),
        ("stream, disk", "cpu", 3, ("stream", "disk")),
        ("disk", "cpu", 3, ("disk",)),
    ],
)
def test_weights_take_the_shortest_way_that_reaches_every_engine(
    transport: str, device: str, num_machines: int, chosen: tuple[str, ...]
) -> None:
    config = config_of({"transport": transport, "address": "10.0.0.1"}, device)
    resolved = resolve_transport(config, num_machines)
    assert resolved.transports == chosen and resolved.address == "10.0.0.1"
    assert resolved.dir == str(Path("runs/one/weights").absolute())
    assert resolve_transport(config_of({"dir": "/shared"}), 1).dir == "/shared"


def test_a_way_that_cannot_reach_every_machine_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError) as error:
        resolve_transport(config_of({"transport": "shared_memory"}), 2)
    assert str(error.value) == (
        "weights.transport = shared_memory reaches engines of the trainer's machine only, and there are 2 machines; "
        "set auto, stream or disk"
    )
    with pytest.raises(ConfigError) as error:
        resolve_transport(config_of({"address": "127.0.0.1"}), 3)
    assert str(error.value) == (
        "weights.address = 127.0.0.1 cannot be reached from the other 2 machines; leave it out, or name an address of "
        "the trainer's machine"
    )
    assert [resolve_transport(config_of({}), number).address for number in (1, 3)] == ["127.0.0.1", "own"]
    assert resolve_transport(config_of({"transport": "stream,disk"}), 2).transports == ("stream", "disk")


@pytest.mark.parametrize("transport", ["cuda", "nccl", "", "stream,", "stream,stream", "auto,disk"])
def test_a_transport_nobody_knows_is_refused_before_anything_starts(transport: str) -> None:
    with pytest.raises(ConfigError) as error:
        config_of({"transport": transport})
    assert str(error.value) == (
        f"config: weights.transport = {transport} is neither auto nor some of shared_memory, stream and disk, each "
        "once; set one of them"
    )


def test_invariant_11_a_run_makes_the_same_weights_by_every_way(tmp_path: Path, tiny_model: str) -> None:
    """Verified weight sync at every load: each engine ran what was published, however it came."""
    digests = {}
    for transport in ("auto", "stream", "disk"):
        (tmp_path / transport).mkdir()
        sections = {"run": {"steps": 2}, "task": {"eval": ""}, "staleness": {"max_staleness": 0}}
        config = make_config(tmp_path / transport, tiny_model, **sections, weights={"transport": transport})
        run_inline(config)
        events = events_of(config)
        check_finished(config, events)
        digests[transport] = [event.digest for event in events if event.kind == "trained"]
        assert max(event.parity_max_abs for event in events if event.kind == "swapped") < 1e-5
        kept = sorted(path.name for path in (Path(config.run.dir) / "weights").glob("*"))
        assert kept == (["version-1", "version-2"] if transport == "disk" else [])
    assert digests["auto"] == digests["stream"] == digests["disk"] and len(set(digests["auto"])) == 2


@pytest.mark.slow
def test_invariant_11_engines_in_processes_are_sent_their_weights(tmp_path: Path, tiny_model: str) -> None:
    """Verified weight sync at every load, by two engines at once, over connections and without shared memory."""
    sections = {"engine": {"count": 2}, "weights": {"transport": "stream"}}
    path = write_config(tmp_path, tiny_model, run={"runtime": "local"}, **sections)
    config = load(path)
    with HeadwayProcess("train", path, run=Path(config.run.dir)) as run:
        assert run.wait() == 0, run.output
    check_finished(config, run.events())
    swapped = [event for event in run.events() if event.kind == "swapped"]
    assert len(swapped) == 2 * (config.run.steps + 1) and max(e.parity_max_abs for e in swapped) < 1e-5
