import json
import sys
import threading
from pathlib import Path

import pytest
from synthetic import START, SyntheticRun, blank, finished_run
from test_view import plain_lines

from headway.config import MetricsSection
from headway.errors import ConfigError
from headway.monitor.metric_names import meaning
from headway.monitor.metrics import Metrics, Point, check_tools, point_of
from headway.monitor.rates import left_s, rates
from headway.monitor.report import summarise
from headway.record.events import EtaChanged, Event, FailedTrajectory
from headway.record.run import Run, fold
from headway.types import StopReason


def write_all(run_dir: Path, events: list[Event], section: MetricsSection, run: Run | None = None) -> list[str]:
    complaints: list[str] = []
    run = run or Run()
    metrics = Metrics(run_dir, section, run, complain=complaints.append)
    for event in events:
        run.on_event(event)
        metrics.on_event(event)
    metrics.close()
    return complaints


def points(events: list[Event]) -> list[Point]:
    run, found = Run(), []
    for event in events:
        run.on_event(event)
        found.append(point_of(event, run))
    return [point for point in found if point is not None]


def test_each_step_evaluation_swap_and_stats_event_becomes_one_point():
    events = finished_run(steps=6)
    found = points(events)
    assert len(found) == sum(event.kind in ("trained", "evaluated", "swapped", "stats") for event in events)
    trained = [point for point in found if "train/loss" in point.scalars]
    assert [point.step for point in trained] == [1, 2, 3, 4, 5, 6]
    expected = {f"train/{name}" for name in ("reward", "loss", "entropy", "tokens", "tokens_per_s", "truncated_share")}
    assert all(expected <= set(point.scalars) for point in trained)
    assert not any(tag.endswith(("/seq", "/time", "/version")) for point in found for tag in point.scalars)


def test_failures_truncation_stop_reasons_and_equal_rewards_are_metrics():
    run = SyntheticRun(steps=2, batch=2)
    run.admit()
    stops = (StopReason.STOP, StopReason.LENGTH, StopReason.CONTEXT)
    failures = (FailedTrajectory(3, "verifier: down", 7),)
    for group, rewards in ((0, (1.0, 1.0, 1.0)), (1, (0.0, 1.0, 1.0))):
        run.add("finished", group=group, shard="s", offset=0, num_bytes=1, checksum="0", lengths=(5, 5, 5),
                rewards=rewards, stops=stops, failures=failures, oldest=0, newest=0, seconds=1.0)  # fmt: skip
    run.add("taken", version=0, groups=(0, 1))
    run.events.append(blank("trained", seq=len(run.events), version=1, groups=(0, 1), tokens=30))
    scalars = points(run.events)[-1].scalars
    assert scalars["train/truncated_share"] == pytest.approx(2 / 3)
    assert scalars["train/zero_variance_share"] == 0.5 and scalars["train/failed_share"] == 0.25
    assert scalars["train/stop_length"] == pytest.approx(1 / 3)
    text = "\n".join(plain_lines(run.events))
    assert "truncated  67%" in text and "zero var  50%" in text
    summary = summarise(fold(run.events))
    assert summary.failures == {"verifier": 2} and summary.zero_variance_share == 0.5
    assert summary.stops == {"stop": 2, "length": 2, "context": 2}


def test_two_engines_do_not_mix_their_tags():
    run = SyntheticRun(steps=2)
    for engine in ("left", "right", "left", "right"):
        run.now += 1.0
        run.generated = 100
        run.look(1.0, 0.0, engine=engine)
    found = [point.scalars for point in points(run.events)]
    assert found[0]["engine/left/generated_per_s"] == found[3]["engine/right/generated_per_s"] == 100.0
    assert "engine/right/running" in found[1]


def test_numbers_that_are_not_finite_are_left_out():
    run = SyntheticRun(steps=1)
    run.step(loss=None, grad_norm=float("inf"), odd=float("nan"))
    (trained,) = [point.scalars for point in points(run.events) if "train/reward" in point.scalars]
    assert not {"train/loss", "train/grad_norm", "train/odd"} & set(trained)


def read_tensorboard(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    accumulator = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"tensors": 0})
    accumulator.Reload()
    return {
        tag: [(event.step, float(tensor_util.make_ndarray(event.tensor_proto))) for event in accumulator.Tensors(tag)]
        for tag in accumulator.Tags()["tensors"]
    } | {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_reads_back_what_was_written_each_point_once_across_a_resume(tmp_path):
    events = finished_run(steps=5)
    half = len(events) // 2
    section = MetricsSection(tensorboard=True)
    write_all(tmp_path, events[:half], section)
    write_all(tmp_path, events[half:], section, run=fold(events[:half]))
    scalars = read_tensorboard(tmp_path)
    rewards = [(event.version, event.reward) for event in events if event.kind == "trained"]
    assert [step for step, _ in scalars["train/reward"]] == [1, 2, 3, 4, 5]
    assert [value for _, value in scalars["train/reward"]] == pytest.approx([reward for _, reward in rewards])
    assert [value for _, value in scalars["eval/accuracy"]] == pytest.approx([0.4, 0.9])
    assert "weights/engine-0/pause_ms" in scalars


def test_metrics_do_not_load_torch(tmp_path):
    code = (
        "import sys; from pathlib import Path; from headway.monitor.metrics import Metrics; "
        "from headway.config import MetricsSection; "
        "from headway.record.run import Run; "
        f"Metrics(Path({str(tmp_path)!r}), MetricsSection(), Run()).close(); sys.exit('torch' in sys.modules)"
    )
    import subprocess

    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_wandb_project_without_wandb_is_refused_at_start_up_with_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb, or clear the setting"):
        check_tools(MetricsSection(wandb_project="mine"))


WANDB = """
import json
class Run:
    def __init__(self, **options):
        if options["project"] == "refused":
            raise RuntimeError("api key not configured")
        self.path = options["dir"] + "/wandb_calls.jsonl"
        self.put(["init", options["id"]])
    def put(self, value):
        with open(self.path, "a") as file:
            file.write(json.dumps(value) + chr(10))
    def define_metric(self, *names, **options): self.put(["define", *names])
    def log(self, values): self.put(["log", values])
    def finish(self): self.put(["finish"])
def init(**options): return Run(**options)
"""


@pytest.fixture
def small_wandb(tmp_path, monkeypatch):
    """A module that is called as wandb is and writes down its calls."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield
    sys.modules.pop("wandb", None)


def test_wandb_gets_scalars_with_their_step_and_one_id_for_all_incarnations(tmp_path, small_wandb):
    events = finished_run(steps=3)
    section = MetricsSection(tensorboard=False, wandb_project="mine")
    write_all(tmp_path, events, section)
    write_all(tmp_path, [], section, run=fold(events))
    calls = [json.loads(line) for line in (tmp_path / "wandb_calls.jsonl").read_text().splitlines()]
    ids = [call[1] for call in calls if call[0] == "init"]
    logged = [call[1] for call in calls if call[0] == "log"]
    assert len(ids) == 2 and ids[0] == ids[1]
    assert [values["step"] for values in logged if "train/reward" in values] == [1, 2, 3]
    assert [call[0] for call in calls].count("finish") == 2


def test_a_wandb_that_does_not_start_is_one_sentence(tmp_path, small_wandb):
    with pytest.raises(ConfigError, match=r"api key not configured\): run wandb login"):
        Metrics(tmp_path, MetricsSection(tensorboard=False, wandb_project="refused"), Run())


def test_a_tool_that_breaks_is_named_once_and_the_run_goes_on(tmp_path, small_wandb):
    def broken(self, values: dict) -> None:
        raise OSError("no network")

    import wandb

    wandb.Run.log = broken
    complaints = write_all(tmp_path, finished_run(steps=4), MetricsSection(tensorboard=True, wandb_project="mine"))
    assert len(complaints) == 1 and complaints[0].startswith("WeightsAndBiases failed")
    assert len(read_tensorboard(tmp_path)["train/reward"]) == 4


def test_on_event_returns_while_a_tool_stands_still(tmp_path, small_wandb):
    run = Run()
    metrics = Metrics(tmp_path, MetricsSection(tensorboard=False, wandb_project="mine"), run)
    stand_still, reached, written = threading.Event(), threading.Event(), []

    def stuck(self, values: dict) -> None:
        reached.set()
        assert stand_still.wait(20)
        written.append(values)

    sys.modules["wandb"].Run.log = stuck
    for event in finished_run(steps=3):
        run.on_event(event)
        metrics.on_event(event)
    assert reached.wait(20) and not written
    stand_still.set()
    metrics.close()
    assert [values["step"] for values in written if "train/reward" in values] == [1, 2, 3]


def test_recent_rates_know_pace_and_waits():
    run = fold(finished_run(steps=20)[:-1])
    recent = rates(run)
    assert run.num_trained == 20 and left_s(run, START) == 0
    assert recent.trainer_busy == pytest.approx(1.0 / 1.3, rel=0.05)
    assert recent.trainer_wait == pytest.approx(0.25 / 1.25, rel=0.05)


def test_the_time_left_follows_the_pace_of_recent_steps_and_the_clock():
    synthetic = SyntheticRun(steps=10)
    for _ in range(4):
        synthetic.step(seconds=1.75, wait_s=0.2)
    run = fold(synthetic.events)
    last = run.steps[-1].event.time
    assert left_s(run, last) == pytest.approx(6 * 2.0)
    assert left_s(run, last + 1.5) == pytest.approx(6 * 2.0 - 1.5)


def test_the_time_between_two_incarnations_is_in_no_rate():
    synthetic = SyntheticRun(steps=10)
    for _ in range(3):
        synthetic.step(seconds=0.75, wait_s=0.2)
    synthetic.crash(downtime_s=10_000.0)
    for _ in range(2):
        synthetic.step(seconds=0.75, wait_s=0.2)
    run = fold(synthetic.events)
    assert left_s(run, run.steps[-1].event.time) == pytest.approx(5 * 1.0)
    assert rates(run).trained_per_s > 100 and rates(run).generated_per_s > 100


def test_an_engine_that_was_lost_is_in_no_rate():
    synthetic = SyntheticRun(steps=10)
    synthetic.step()
    assert rates(fold(synthetic.events)).generated_per_s > 0
    synthetic.add("worker_lost", worker="engine-0", cause="killed", groups=())
    assert rates(fold(synthetic.events)).generated_per_s == 0


def test_every_name_that_a_tool_is_sent_is_explained():
    changed = EtaChanged(version=1, before=2, after=1, effective_sample_size=0.5, behaviour_kl=0.1)
    sent = {tag for point in points([*finished_run(steps=6), changed]) for tag in point.scalars}
    assert {"staleness/eta", "train/loss", "eval/accuracy"} <= sent
    assert not [name for name in sent if meaning(name) is None]
