import json
import sys
import threading
from pathlib import Path

import pytest
from synthetic import START, SyntheticRun, finished_run

from headway.config import MetricsSection
from headway.errors import ConfigError
from headway.monitor.metrics import METRICS_FILE, Board, Metrics, Points, rebuild
from headway.record.events import Event

QUIET = MetricsSection(tensorboard=False)


def lines(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / METRICS_FILE).read_text().splitlines()]


def write_all(run_dir: Path, events: list[Event], section: MetricsSection = QUIET, **options) -> list[str]:
    complaints: list[str] = []
    metrics = Metrics(run_dir, section, complain=complaints.append, **options)
    for event in events:
        metrics.on_event(event)
    metrics.close()
    return complaints


def test_each_step_evaluation_swap_and_look_becomes_one_flat_line(tmp_path):
    events = finished_run(steps=6)
    assert write_all(tmp_path, events) == []
    written = lines(tmp_path)
    kinds = ("trained", "evaluated", "swapped", "stats")
    assert [line["seq"] for line in written] == [event.seq for event in events if event.kind in kinds]
    trained = [line for line in written if line["kind"] == "trained"]
    assert [line["step"] for line in trained] == [1, 2, 3, 4, 5, 6]
    assert all({"time", "reward", "loss", "entropy", "tokens", "trained_per_s"} <= set(line) for line in trained)
    texts = ("kind", "engine", "label")
    assert all(isinstance(value, int | float) for line in written for key, value in line.items() if key not in texts)


def test_rates_come_from_differences_of_an_engines_counters_and_start_anew_after_a_crash(tmp_path):
    run = SyntheticRun(steps=4)
    run.step()
    run.step()
    run.crash()
    run.step()
    points = list(Points().over(run.events))
    looks = [point for point in points if point.kind == "stats"]
    counts = [event for event in run.events if event.kind == "stats"]
    expected = (counts[1]["num_generated"] - counts[0]["num_generated"]) / (counts[1].time - counts[0].time)
    assert looks[1].numbers["generated_per_s"] == pytest.approx(expected)
    resumed = next(event for event in run.events if event.kind == "resumed")
    assert looks[2].numbers["generated_per_s"] == pytest.approx(
        counts[2]["num_generated"] / (counts[2].time - resumed.time)
    )


def test_two_engines_do_not_mix_their_counters_or_their_tags():
    run = SyntheticRun(steps=2)
    for engine in ("engine_left", "right", "engine_left", "right"):
        run.now += 1.0
        run.counters["generated"] += 100
        run.look(1.0, 0.0, engine=engine)
    points = list(Points().over(run.events))
    assert [point.numbers["generated_per_s"] for point in points] == [100.0, 100.0, 100.0, 100.0]
    assert "stats/left/running" in points[0].scalars() and "stats/right/running" in points[1].scalars()


def test_numbers_that_are_not_finite_do_not_spoil_the_file(tmp_path):
    run = SyntheticRun(steps=1)
    run.step(loss=None, grad_norm=float("inf"), odd=float("nan"))
    assert write_all(tmp_path, run.events) == []
    (trained,) = [line for line in lines(tmp_path) if line["kind"] == "trained"]
    assert "loss" not in trained and trained["grad_norm"] is None and trained["odd"] is None


def test_rebuild_gives_the_bytes_that_were_written_live(tmp_path):
    events = finished_run(steps=8)
    write_all(tmp_path, events)
    live = (tmp_path / METRICS_FILE).read_bytes()
    (tmp_path / METRICS_FILE).unlink()
    rebuild(events, tmp_path)
    assert (tmp_path / METRICS_FILE).read_bytes() == live


def test_a_resumed_run_completes_what_the_killed_one_had_not_written(tmp_path):
    events = finished_run(steps=8)
    half = len(events) // 2
    write_all(tmp_path, events[: half - 10])
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 3, "ti')
    write_all(tmp_path, events[half:], history=events[:half])
    resumed = (tmp_path / METRICS_FILE).read_bytes()
    rebuild(events, tmp_path)
    assert (tmp_path / METRICS_FILE).read_bytes() == resumed


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
    write_all(tmp_path, events[: half - 8], section)
    write_all(tmp_path, events[half:], section, history=events[:half])
    scalars = read_tensorboard(tmp_path)
    rewards = [(event.version, event.reward) for event in events if event.kind == "trained"]
    assert [step for step, _ in scalars["trained/reward"]] == [1, 2, 3, 4, 5]
    assert [value for _, value in scalars["trained/reward"]] == pytest.approx([reward for _, reward in rewards])
    assert [value for _, value in scalars["evaluated/accuracy"]] == pytest.approx([0.4, 0.9])
    assert "swapped/engine-0/pause_ms" in scalars


def test_metrics_do_not_load_torch(tmp_path):
    code = (
        "import sys; from pathlib import Path; from headway.monitor.metrics import Metrics; "
        "from headway.config import MetricsSection; "
        f"Metrics(Path({str(tmp_path)!r}), MetricsSection()).close(); sys.exit('torch' in sys.modules)"
    )
    import subprocess

    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_wandb_project_without_wandb_is_refused_at_start_up_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb, or clear the setting"):
        Metrics(tmp_path, MetricsSection(wandb_project="mine"))


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


def test_wandb_gets_scalars_with_their_step_and_one_id_for_all_lives(tmp_path, small_wandb):
    events = finished_run(steps=3)
    section = MetricsSection(tensorboard=False, wandb_project="mine")
    write_all(tmp_path, events, section)
    write_all(tmp_path, [], section, history=events)
    calls = [json.loads(line) for line in (tmp_path / "wandb_calls.jsonl").read_text().splitlines()]
    ids = [call[1] for call in calls if call[0] == "init"]
    logged = [call[1] for call in calls if call[0] == "log"]
    assert len(ids) == 2 and ids[0] == ids[1]
    assert [values["step"] for values in logged if "trained/reward" in values] == [1, 2, 3]
    assert [call[0] for call in calls].count("finish") == 2


def test_a_wandb_that_does_not_start_is_one_sentence(tmp_path, small_wandb):
    with pytest.raises(ConfigError, match=r"api key not configured\): run wandb login"):
        Metrics(tmp_path, MetricsSection(tensorboard=False, wandb_project="refused"))


def test_a_sink_that_breaks_is_named_once_and_the_others_go_on(tmp_path):
    complaints: list[str] = []
    metrics = Metrics(tmp_path, QUIET, complain=complaints.append)
    (tmp_path / METRICS_FILE).unlink()
    (tmp_path / METRICS_FILE).mkdir()
    for event in finished_run(steps=4):
        metrics.on_event(event)
    metrics.close()
    assert len(complaints) == 1 and complaints[0].startswith("JsonLines failed")


def test_on_event_returns_while_a_sink_stands_still(tmp_path, small_wandb):
    metrics = Metrics(tmp_path, MetricsSection(tensorboard=False, wandb_project="mine"))
    stand_still, reached = threading.Event(), threading.Event()

    def stuck(values: dict) -> None:
        reached.set()
        assert stand_still.wait(20)

    sys.modules["wandb"].Run.log = lambda self, values: stuck(values)
    for event in finished_run(steps=3):
        metrics.on_event(event)
    assert reached.wait(20) and not (tmp_path / METRICS_FILE).read_text()
    stand_still.set()
    metrics.close()
    assert [line["step"] for line in lines(tmp_path) if line["kind"] == "trained"] == [1, 2, 3]


def test_the_board_knows_pace_waits_and_accuracy(tmp_path):
    board = Board()
    for event in finished_run(steps=20):
        if event.kind == "ended":
            break
        board.on_event(event)
    assert board.step == 20 and board.left_s(START) == 0
    assert board.before.accuracy == 0.4 and board.evaluated.accuracy == 0.9
    assert board.trainer_busy_share == pytest.approx(1.0 / 1.3, rel=0.05)
    assert board.wait_share("trainer_wait_s") == pytest.approx(0.25 / 1.3, rel=0.05)
    assert board.dropped == {"failed": 1}


def test_the_time_left_follows_the_pace_of_recent_steps_and_the_clock():
    run = SyntheticRun(steps=10)
    board = Board()
    for _ in range(4):
        run.step(seconds=1.75, wait_s=0.2)
    for event in run.events:
        board.on_event(event)
    last = board.trained[-1].time
    assert board.left_s(last) == pytest.approx(6 * 2.0)
    assert board.left_s(last + 1.5) == pytest.approx(6 * 2.0 - 1.5)


def test_a_dead_time_between_two_lives_is_in_no_rate():
    run = SyntheticRun(steps=10)
    for _ in range(3):
        run.step(seconds=0.75, wait_s=0.2)
    run.crash(downtime_s=10_000.0)
    for _ in range(2):
        run.step(seconds=0.75, wait_s=0.2)
    board = Board()
    for event in run.events:
        board.on_event(event)
    assert board.left_s(board.trained[-1].time) == pytest.approx(5 * 1.0)
    assert board.trained_per_s > 100 and board.generated_per_s > 100


def test_looks_far_apart_still_give_rates():
    run = SyntheticRun(steps=2)
    for _ in range(3):
        run.now += 120.0
        run.counters["generated"] += 1200
        run.look(120.0, 60.0)
    run.now += 100.0
    run.checkpoint()
    board = Board()
    for event in run.events:
        board.on_event(event)
    assert board.generated_per_s == pytest.approx(10.0)
    assert board.wait_share("trainer_wait_s") == pytest.approx(0.5)
