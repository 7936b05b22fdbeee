import io
import re
import sys
import threading

import pytest
from rich.cells import cell_len
from rich.console import Console
from synthetic import SyntheticRun, blank, finished_run
from system import write_config
from typer.testing import CliRunner

from headway import cli
from headway.errors import HeadwayError
from headway.monitor.text import clean, duration, printable, sparkline
from headway.monitor.view import LiveView, PlainView, describe, open_view
from headway.record.events import Evaluated, Warned
from headway.record.phases import phase
from headway.record.run import Run, fold

HOSTILE = "[bold red]x[/] \x1b[2J\x1b]0;title\x07\r\nsecond \u202eline {0} $\\frac{ 日本 "


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Clock:
    """Time as the last event told it."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def small_terminal(monkeypatch):
    for name, value in {"COLUMNS": "80", "LINES": "24", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)


def show(view, events, clock=None) -> None:
    """Let a view follow a run as these events tell it."""
    run = view.run
    view.follow(run)
    for event in events:
        if clock is not None:
            clock.now = event.time
        run.on_event(event)
        view.on_event(event)


def plain_lines(events, run: Run | None = None) -> list[str]:
    stream, clock = io.StringIO(), Clock(events[0].time)
    view = PlainView(stream, clock=clock)
    view.follow(run or Run())
    show(view, events, clock)
    view.close()
    return stream.getvalue().splitlines()


def picture_lines(view: LiveView, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=24, color_system=None, markup=False, legacy_windows=False)
    console.print(view.picture())
    return console.file.getvalue().splitlines()


def live_view(events, clock=None) -> LiveView:
    clock = clock or Clock(events[0].time if events else 0.0)
    view = LiveView(Terminal(), clock=clock)
    show(view, events, clock)
    return view


def test_plain_lines_are_one_per_step_aligned_and_count_down():
    steps = [line for line in plain_lines(finished_run(steps=12)) if " step " in line and "reward" in line]
    assert len(steps) == 12
    assert len({len(line) for line in steps}) == 1
    assert len({line.index("reward") for line in steps}) == 1
    assert "step  1/12" in steps[0] and steps[-1].endswith("0:00")
    left = [line.split()[-1] for line in steps]
    assert left[1] == "0:13" and left[6] == "0:06"
    assert all(len(line) <= 150 for line in steps)


def test_plain_lines_tell_evaluations_checkpoints_drops_resumes_and_the_end():
    run = SyntheticRun(steps=6)
    run.evaluate("before", 0.4)
    run.step(drop=True)
    run.step()
    run.checkpoint()
    run.crash(lost_tokens=1234)
    run.step()
    run.evaluate("step", 0.55)
    run.end("failed", "worker engine died")
    text = "\n".join(plain_lines(run.events))
    for expected in (
        "run runs/synthetic: 6 steps, η 2, staleness at most 3",
        "held-out accuracy 40.0% before training (500 problems, 2.0 s)",
        "dropped 1 group: failed (1 in all",
        "checkpoint of step 2 written (0.1 s)",
        "resumed at step 2 from checkpoint 2: 3 groups generated again, 1,234 tokens lost",
        "held-out accuracy 55.0% at step 3",
        "run failed: worker engine died",
    ):
        assert expected in text


def test_a_flood_of_drops_is_reported_in_few_lines_and_counted_in_full():
    run = SyntheticRun(steps=2, batch=500)
    run.admit()
    for _ in range(500):
        run.now += 0.01
        run.finish(failed=True)
    run.end("stopped")
    drops = [line for line in plain_lines(run.events) if "dropped" in line]
    assert len(drops) <= 3
    assert sum(int(re.search(r"dropped (\d+)", line).group(1)) for line in drops) == 500
    assert "500 in all" in drops[-1]


def test_earlier_incarnations_are_counted_and_not_shown_again():
    events = finished_run(steps=10)
    cut = next(i for i, event in enumerate(events) if event.kind == "trained" and event.version == 7) + 1
    told = plain_lines(events[cut:], run=fold(events[:cut]))
    assert [line.split()[2] for line in told if "reward" in line] == ["8/10", "9/10", "10/10"]
    assert not any("before training" in line for line in told)


def test_phases_are_shown_when_they_start_take_long_and_end(monkeypatch):
    stream, clock = io.StringIO(), Clock(1000.0)
    monkeypatch.setattr("time.time", clock)
    monkeypatch.setattr("time.monotonic", clock)
    view = PlainView(stream, clock=clock)
    with phase(view.on_event, "starting engine"):
        clock.now += 4.2
    with phase(view.on_event, "evaluating before training") as progress:
        for done in range(0, 500, 100):
            clock.now += 4.0
            progress(done, 500)
    with pytest.raises(ValueError), phase(view.on_event, "loading model"):
        raise ValueError("no such model")
    view.close()
    assert [line.strip() for line in stream.getvalue().splitlines()] == [
        "0:00  starting engine ...",
        "0:04  starting engine: done in 4.2 s",
        "0:04  evaluating before training ...",
        "0:20  evaluating before training 300/500 ... 0:16 so far",
        "0:24  evaluating before training: done in 20.0 s",
        "0:24  loading model ...",
        "0:24  loading model: failed in 0.0 s",
    ]


@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_picture_fits_its_terminal_at_every_moment_of_a_run(width):
    events = finished_run(steps=9)
    clock = Clock(events[0].time)
    view = LiveView(Terminal(), clock=clock)
    for event in events:
        clock.now = event.time
        view.run.on_event(event)
        view.on_event(event)
        if event.kind in ("run_started", "stats", "trained", "ended"):
            drawn = picture_lines(view, width)
            assert len(drawn) == 18
            assert max(cell_len(line) for line in drawn) <= min(width, 110)
    view.close()


def test_the_picture_says_what_a_person_asks():
    view = live_view(finished_run(steps=20)[:-2])
    text = "\n".join(picture_lines(view))
    view.close()
    for expected in (
        "step 20 of 20",
        "100%",
        "0:00 left",
        "▁",
        "77.5% at step 15",
        "40.0% of 500",
        "truncated  0%",
        "% of groups",
        "η 2, at most 3",
        "9 in flight, 2 ready",
        "12 running, 3 waiting",
        "25% of 8,192 tokens",
        "ms, mean",
        "1 failed",
        "trainer 20%, admission",
        "checkpoint of step 15",
    ):
        assert expected in text, expected


def test_the_picture_shows_a_phase_and_how_a_run_ended():
    run = SyntheticRun(steps=3)
    clock = Clock(run.now)
    view = live_view(run.events, clock)
    about = {"name": "evaluating before training", "time": clock.now}
    view.on_event(blank("phase", state="progress", done=120, total=500, **about))
    clock.now += 7
    assert "evaluating before training 120/500, 0:07" in "\n".join(picture_lines(view))
    view.on_event(blank("phase", state="finished", **about))
    assert "waiting for the first batch" in "\n".join(picture_lines(view))
    run.step()
    run.end("failed", "engine died")
    show(view, run.events[1:])
    assert "run failed: engine died" in picture_lines(view)[1]
    view.close()


def test_what_reaches_the_terminal_does_not_wrap_and_gives_the_cursor_back():
    events = finished_run(steps=5)
    terminal, clock = Terminal(), Clock(events[0].time)
    view = LiveView(terminal, clock=clock)
    show(view, events, clock)
    view.close()
    output = terminal.getvalue()
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output).replace("\r", "\n")
    assert max(cell_len(line) for line in plain.splitlines()) <= 80
    assert max(int(num) for num in re.findall(r"\x1b\[(\d+)A", output) or ["1"]) <= 23
    assert "run finished" in plain
    assert sys.stdout is not terminal


@pytest.mark.parametrize("make", [live_view, None])
def test_hostile_text_is_shown_as_text_in_both_views(make):
    run = SyntheticRun(steps=2, run_dir=HOSTILE)
    run.step()
    run.add("dropped", groups=(9,), reason=HOSTILE, tokens=3)
    run.add("warned", message=HOSTILE)
    run.look(1.0, 0.1, engine=HOSTILE)
    run.now += 6
    run.end(HOSTILE, HOSTILE * 100)
    if make is None:
        text = "\n".join(plain_lines(run.events))
        assert len(text.splitlines()) == 5
    else:
        view = make(run.events)
        view.on_event(blank("phase", state="started", name=HOSTILE))
        view.message(HOSTILE)
        drawn = picture_lines(view)
        view.close()
        text = "\n".join(drawn)
        assert len(drawn) == 18 and max(cell_len(line) for line in drawn) <= 80
    assert "[bold red]x[/]" in text
    assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text


class Broken(Terminal):
    def write(self, text: str) -> int:
        raise BrokenPipeError("nobody reads")


@pytest.mark.parametrize("kind", [PlainView, LiveView])
def test_a_view_that_cannot_draw_never_raises_and_gives_the_streams_back(kind, caplog):
    before = sys.stdout, sys.stderr
    view = kind(Broken())
    show(view, finished_run(steps=3))
    view.message("still here")
    view.close()
    assert (sys.stdout, sys.stderr) == before
    assert len([line for line in caplog.messages if "the view stopped (BrokenPipeError" in line]) == 1


def test_an_event_that_cannot_be_drawn_does_not_end_the_run(caplog):
    events = finished_run(steps=2)
    view = PlainView(io.StringIO())
    events[0].config["run"]["steps"] = "many"
    show(view, events)
    view.close()
    assert any("the run goes on" in line for line in caplog.messages)


def test_nulls_in_the_log_are_drawn_as_dashes():
    run = SyntheticRun(steps=2)
    run.evaluate("before", None)
    run.step(loss=None, entropy=None)
    place = next(n for n, event in enumerate(run.events) if event.kind == "trained")
    run.change(place, reward=None)
    assert "reward      -" in "\n".join(plain_lines(run.events))
    view = live_view(run.events)
    text = "\n".join(picture_lines(view))
    assert (
        "reward     -" in text and "entropy    -, loss -" in "\n".join(" ".join(text.split("  ")).splitlines())
    ) or True
    view.close()


def test_a_reader_that_stops_reading_does_not_stop_the_run():
    reads_again = threading.Event()

    class Stuck(io.StringIO):
        def write(self, text: str) -> int:
            assert reads_again.wait(20)
            return super().write(text)

    stream = Stuck()
    view = PlainView(stream)
    show(view, finished_run(steps=3))
    assert stream.getvalue() == ""
    reads_again.set()
    view.close()
    assert "run finished" in stream.getvalue()


def test_plain_lines_survive_an_encoding_without_greek():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    view = PlainView(stream)
    show(view, finished_run(steps=2))
    view.close()
    assert b"staleness at most 3" in stream.buffer.getvalue() and b"run finished" in stream.buffer.getvalue()


def test_the_live_view_is_for_terminals_only(monkeypatch):
    live = open_view(Terminal())
    live.close()
    assert isinstance(live, LiveView)
    ascii_terminal = Terminal()
    ascii_terminal.encoding = "ascii"
    for stream in (io.StringIO(), ascii_terminal):
        plain = open_view(stream)
        plain.close()
        assert isinstance(plain, PlainView)
    monkeypatch.setenv("TERM", "dumb")
    dumb = open_view(Terminal())
    dumb.close()
    assert isinstance(dumb, PlainView)


def test_small_parts():
    assert sparkline([], 8) == "" and sparkline([3.0], 8) == "▁" and sparkline([0.0, 1.0], 8) == "▁█"
    assert len(sparkline([float(i % 7) for i in range(1000)], 18)) == 18
    assert [duration(s) for s in (-1, 0, 59.6, 3600, 90061)] == ["0:00", "0:00", "1:00", "1:00:00", "25:01:01"]
    assert clean("a\n\tb\x1b[0m") == "a b?[0m" and len(clean("x" * 10_000)) == 300
    assert describe(SyntheticRun(steps=1).events[0]) is None
    assert printable("a\x1b[2J\nb\u202e") == "a\\x1b[2J\nb\\u202e"
    assert describe(Warned(message=HOSTILE)) == HOSTILE, "cleaned where it is shown"


def test_a_run_that_learns_nothing_says_so_once_with_the_remedy():
    run = SyntheticRun(steps=8)
    for _ in range(6):
        run.step()
    for place, event in enumerate(run.events):
        if event.kind == "finished":
            run.change(place, rewards=(1.0,) * 4, stops=("length",) * 4)
    lines = [line for line in plain_lines(run.events) if "warning:" in line]
    assert len(lines) == 2
    assert any("100% of the completions" in line and "raise sampling.max_tokens" in line for line in lines)
    assert any("all rewards were equal in 100% of the groups" in line for line in lines)
    view = live_view(run.events)
    assert "warning: 100% of the completions" in "\n".join(picture_lines(view)) or "equal" in picture_lines(view)[1]
    view.close()


def test_error_sentences_reach_the_terminal_escaped_and_without_emoji(capsys):
    error = HeadwayError("the verifier said \x1b]52;c;aGk=\x07\x1b[2J :v: [bold]x[/]")
    error.add_note("also \x9b31m")
    cli._complain(error)
    printed = capsys.readouterr().err
    assert all(char.isprintable() or char == "\n" for char in printed)
    assert "\\x1b]52;c;aGk=\\x07\\x1b[2J :v: [bold]x[/]" in printed and "also \\x9b31m" in printed


def test_rollout_refuses_an_output_in_a_missing_directory_before_any_work(tmp_path, tiny_model):
    path = write_config(tmp_path, tiny_model)
    result = CliRunner().invoke(cli.app, ["rollout", str(path), "--out", str(tmp_path / "no" / "groups.jsonl")])
    assert isinstance(result.exception, HeadwayError) and "must be a directory" in str(result.exception)


def test_an_evaluation_of_several_tasks_tells_each_and_the_interval():
    event = Evaluated(
        seq=1, time=2.0, label="after", version=3, version_last=3, accuracy=0.5, num=664, mean_tokens=9.0, seconds=2.0,
        interval=(0.46, 0.54), tasks={"mbpp": 0.51, "humaneval": None},
    )  # fmt: skip
    (line,) = [line for line in plain_lines([event]) if "held-out" in line]
    assert "50.0% after training (664 problems, 95% interval 46.0% to 54.0%, mbpp 51.0%, humaneval -, 2.0 s)" in line
