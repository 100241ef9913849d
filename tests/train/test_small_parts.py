"""Events, console, seeds, signals: the small parts around the loop."""

import json
import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest

from maulstick.errors import OptionError
from maulstick.files_io import atomic_write, set_aside
from maulstick.train.events import EventLog, read_events
from maulstick.train.interrupt import StopSignals
from maulstick.train.processes import without_effect_alone
from maulstick.train.seeds import derive_seed


def test_the_event_log_is_valid_json_even_for_nan(tmp_path):
    log = EventLog(tmp_path / "run.jsonl")
    log.write("step", loss=float("nan"), norm=float("-inf"), images=["a.png"])
    rows = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert rows[0]["event"] == "step"
    assert (rows[0]["loss"], rows[0]["norm"], rows[0]["images"]) == ("nan", "-inf", ["a.png"])
    log.close()


def test_a_name_that_is_no_text_does_not_end_a_run(make_run, images, tmp_path):
    """Log, state, report and console get the half characters that Python makes of such bytes."""
    folder = tmp_path / "data" / "1_shape"
    folder.mkdir(parents=True)
    for number in range(2):
        source = images / "2_shape" / f"{number}.png"
        Path(os.fsdecode(os.fsencode(folder) + f"/caf\xe9{number}.png".encode("latin-1"))).write_bytes(
            source.read_bytes()
        )
    arguments = ("--train_data_dir", str(tmp_path / "data"), "--cache_latents_to_disk", "--save_state")
    assert make_run(*arguments, "--max_train_steps", "1").train().exit_code == 0
    assert make_run(*arguments, "--max_train_steps", "2", "--resume", "auto").train().exit_code == 0
    assert len(list(folder.glob("*.safetensors"))) == 2
    assert "caf?0.png" in (tmp_path / "out" / "last.events.jsonl").read_text()


def test_a_cut_off_last_line_is_left_out(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"event": "step", "n": 1}\n{"event": "st')
    assert [event["n"] for event in read_events(path)] == [1]


def test_an_earlier_log_is_set_aside_not_overwritten(tmp_path):
    path = tmp_path / "run.jsonl"
    for content in ("first", "second"):
        path.write_text(content)
        set_aside(path)
    EventLog(path).close()
    assert (tmp_path / "run.old-1.jsonl").read_text() == "first"
    assert (tmp_path / "run.old-2.jsonl").read_text() == "second"


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path):
    path = tmp_path / "lora.safetensors"
    path.write_bytes(b"old")

    def fail_midway(temporary):
        temporary.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        atomic_write(path, fail_midway)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["lora.safetensors"]


def test_seeds_differ_by_every_part_of_the_place_and_repeat():
    places = [
        (7, "step", 1, 0, 0),
        (8, "step", 1, 0, 0),
        (7, "step", 2, 0, 0),
        (7, "step", 1, 1, 0),
        (7, "step", 1, 0, 1),
    ]
    seeds = [derive_seed(*place) for place in places]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [derive_seed(*place) for place in places]
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_first_signal_asks_and_the_second_interrupts(capfd):
    with StopSignals() as signals:
        assert signals.requested() is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.requested() == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert "SIGTERM: finishing this step" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_on_a_terminal_the_message_stays_above_a_bar_of_two_lines(capfd, monkeypatch):
    """Before it draws itself anew, rich's live display erases its last line and goes up one."""
    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    with StopSignals():
        os.kill(os.getpid(), signal.SIGTERM)
    assert capfd.readouterr().err == "\nSIGTERM: finishing this step, then saving ...\n\n"


def test_a_full_disk_loses_no_event(tmp_path):
    """/dev/full refuses every write, as a full disk does."""
    troubles = []
    log = EventLog(tmp_path / "run.jsonl", troubles.append)
    log.write("step", number=1)
    room = log._file
    with Path("/dev/full").open("ab", buffering=0) as full:
        log._file = full
        log.write("step", number=2)
        log.write("step", number=3)
    assert len(troubles) == 1
    assert "No space left on device" in troubles[0]
    log._file = room
    log.write("step", number=4)
    log.close()
    assert [event["number"] for event in read_events(tmp_path / "run.jsonl")] == [1, 2, 3, 4]


def test_options_about_ddp_arrive_and_are_named_where_there_is_one_process(make_run):
    usual = make_run("--network_train_unet_only").accelerator
    assert (usual.ddp_handler.gradient_as_bucket_view, usual.ddp_handler.static_graph) == (False, False)
    assert usual.init_handler.timeout == timedelta(hours=12)
    given = ("--ddp_timeout", "30", "--ddp_gradient_as_bucket_view", "--ddp_static_graph")
    run = make_run(*given)
    handler = run.accelerator.ddp_handler
    assert (handler.gradient_as_bucket_view, handler.static_graph, handler.find_unused_parameters) == (
        True,
        True,
        False,
    )
    assert run.accelerator.init_handler.timeout == timedelta(minutes=30)
    assert without_effect_alone(run.options, 1) == [
        "ddp_timeout, ddp_gradient_as_bucket_view, ddp_static_graph have no effect on one process."
    ]
    assert without_effect_alone(run.options, 2) == []
    with pytest.raises(OptionError, match="ddp_static_graph and module_dropout contradict"):
        make_run("--ddp_static_graph", "--module_dropout", "0.1")
    with pytest.raises(OptionError, match="ddp_static_graph and gradient_accumulation_steps = 2 do not go together"):
        make_run("--ddp_static_graph", "--gradient_accumulation_steps", "2")
