"""Progress on a terminal and in a file."""

import io

from rl_posttrain.observability import progress
from rl_posttrain.observability.progress import Progress, duration, print_table


class Clock:
    """Seconds that pass only when told."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def shown(total, seconds_per_step, monkeypatch, initial=0):
    clock, stream = Clock(monkeypatch), io.StringIO()
    with Progress(total, "demo", initial=initial, stream=stream) as bar:
        for step in range(initial + 1, total + 1):
            clock.now += seconds_per_step
            bar.update(step, "grpo", {"reward/mean": 0.12345678, "n": 3})
    return stream.getvalue().splitlines()


def test_fast_steps_print_a_line_each_twentieth(monkeypatch):
    output = shown(1000, 0.01, monkeypatch)
    assert len(output) == 20
    assert output[0] == "demo grpo 50/1000  left 10s  reward/mean 0.1235  n 3"  # 950 steps of 0.01 s are 9.5 s
    assert output[-1].startswith("demo grpo 1000/1000  left 0s")


def test_slow_steps_print_a_line_each_ten_seconds(monkeypatch):
    output = shown(1000, 4.0, monkeypatch)
    assert len(output) == 334  # each third step, at 12 s, and the last
    assert output[0].startswith("demo grpo 3/1000  left 1h06m")  # 997 steps of 4 s are 3988 s


def test_a_resumed_run_counts_its_own_speed(monkeypatch):
    output = shown(100, 1.0, monkeypatch, initial=90)
    assert output[0].startswith("demo grpo 95/100  left 5s")


def test_a_terminal_gets_a_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    with Progress(10, "demo", stream=stream) as bar:
        bar.update(10, "sft", {"loss/total": 0.5, "odd [/name]": 1})
    text = stream.getvalue()
    assert "sft" in text and "10/10" in text and "loss/total 0.5" in text and "[/name]" in text


def test_durations():
    assert [duration(value) for value in (0, 7.4, 59.6, 125, 3725, 90000)] == [
        "0s", "7s", "1m00s", "2m05s", "1h02m", "25h00m",
    ]  # fmt: skip


def test_a_table_shows_its_cells_as_they_are():
    stream = io.StringIO()
    print_table("Held-out", ["domain", "accuracy"], [["[bold]math", 0.51234567], ["code", None]], stream=stream)
    text = stream.getvalue()
    assert "Held-out" in text and "[bold]math" in text and "0.5123" in text and "None" not in text
