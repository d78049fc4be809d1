"""What reaches which stream, on a terminal and off it."""

import logging

from llmctl.cli import app


def test_data_goes_to_stdout_and_talk_to_stderr(console):
    console.data("42")
    console.say("thinking")
    console.error("it broke", "mend it")
    assert console.stdout.getvalue() == "42\n"
    assert console.stderr.getvalue() == "thinking\nerror: it broke\n\nhint: mend it\n"


def test_brackets_in_a_message_are_text_and_not_markup(console):
    console.error("shape [bold]3[/bold] of [12, 8]")
    assert console.stderr.getvalue() == "error: shape [bold]3[/bold] of [12, 8]\n"


def test_long_messages_are_not_broken_into_lines(console):
    console.error("word " * 100)
    assert console.stderr.getvalue().count("\n") == 1


def test_numbers_are_aligned_to_the_right(console):
    console.table(["name", ">count"], [["a", "1"], ["b", "1000"]])
    lines = [line.rstrip() for line in console.stdout.getvalue().splitlines()]
    assert any(line.endswith("    1") for line in lines) and any(line.endswith(" 1000") for line in lines)


def test_progress_without_a_terminal_is_one_line_per_kind_of_work(console):
    with console.progress() as progress:
        for done in range(3):
            progress("downloading", done, 2)
        progress("packing", 0, 0)
    assert console.stderr.getvalue() == "downloading\npacking\n"


def test_a_log_says_now_and_then_how_much_is_left(console, monkeypatch):
    clock = iter([0.0, 10.0, 20.0, 21.0, 40.0])
    monkeypatch.setattr("llmctl.cli.console.time.monotonic", lambda: next(clock))
    with console.progress() as progress:
        for done in (0, 1, 2, 3, 4):
            progress("quantizing", done, 100)
    assert console.stderr.getvalue().splitlines() == [
        "quantizing",
        "quantizing: 2%, about 16 min left",
        "quantizing: 4%, about 16 min left",
    ]


def test_progress_on_a_terminal_draws_on_stderr_only(make_console):
    console = make_console(tty=("stderr",))
    with console.progress() as progress:
        progress("downloading", 1, 2)
        progress("downloading", 2, 2)
    assert "downloading" in console.stderr.getvalue() and console.stdout.getvalue() == ""


def test_the_time_left_is_that_of_all_work_and_not_of_a_burst(make_console, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("rich.console.monotonic", lambda: clock[0])
    monkeypatch.setenv("COLUMNS", "80")
    console = make_console(tty=("stderr",))
    with console.progress() as progress:
        progress("measuring", 10, 50)
        clock[0] += 60.0
        for done in range(11, 21):
            progress("measuring", done, 50)
        progress("measuring: " + "requests wait, " * 10, 20, 50)
    assert console.stderr.getvalue().rstrip().rpartition("about ")[2].startswith("3 min left")


def test_verbose_shows_our_decisions_and_leaves_other_logs_alone(console, monkeypatch):
    def launch(console, config):
        logging.getLogger("llmctl.engine.plan").info("plan: %s", config.model)
        logging.getLogger("somebody.else").info("noise")
        raise KeyboardInterrupt

    monkeypatch.setattr("llmctl.cli.commands.chat._launch", launch)
    app.run(["-v", "chat", "tiny", "-p", "hi"], console)
    assert "INFO llmctl.engine.plan: plan: tiny" in console.stderr.getvalue()
    assert "noise" not in console.stderr.getvalue()
