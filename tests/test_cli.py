"""The commands: help without heavy imports, errors as plain lines, and what each command is given."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from maulstick import __version__
from maulstick.cli import build_app, main
from maulstick.errors import DataError
from maulstick.options.check import DEFAULTS
from maulstick.options.load import LoadedOptions
from maulstick.options.values import option_types

REQUIRED = ["--pretrained_model_name_or_path", "m", "--train_data_dir", "d", "--output_dir", "o"]
CHECK_MODULE = "maulstick.train.prepare"
COMMANDS = ["train", "check", "generate", "quickstart", "report", "autopsy", "optimizers"]


def run_program(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m maulstick`` in a process of its own."""
    source = Path(__file__).parents[1] / "src"
    return subprocess.run(
        [sys.executable, "-m", "maulstick", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(source), "COLUMNS": "100"} | environment,
        check=False,
    )


# ---------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"], ["trian"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys, maulstick.cli; maulstick.cli.main(sys.argv[1:]);"
        "print({'torch', 'numpy', 'diffusers', 'transformers', 'PIL'} & set(sys.modules), file=sys.stderr)"
    )
    source = Path(__file__).parents[1] / "src"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(source)},
        check=True,
    )
    assert done.stderr.splitlines()[-1] == "set()"


@pytest.mark.parametrize("command", ["train", "check"])
@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_help_shows_every_option_in_one_piece_with_its_default(command: str, columns: str) -> None:
    text = run_program(command, "--help", COLUMNS=columns).stdout
    for name in option_types():
        assert len(re.findall(rf"^  --{name}( |$)", text, re.MULTILINE)) == 1
    # The original guardian's two negative switches, and those of what is on without being asked for.
    switches = {"--no-skip_nan_immediate", "--no-skip_inf_immediate", "--no-rescue", "--no-alarms", "--no-autopsy"}
    switches |= {"--no-report", "--no-cache_image_features_to_disk"}
    assert set(re.findall(r"--no-\w+", text)) == switches | ({"--no-dry_step"} if command == "check" else set())
    assert "--empty-" not in text
    flat = " ".join(text.split())
    assert "--network_dim INT Rank of the LoRA; of an OFT the largest size of its blocks. [default: 4]" in flat
    assert "{no,fp16,bf16}" in text
    assert "--enable_bucket Sort images" in flat
    lines = text.splitlines()
    assert max(map(len, lines)) <= max(int(columns), max(len(line) for line in lines if line.startswith("  --")))


def test_help_is_grouped_by_owner() -> None:
    lines = run_program("train", "--help").stdout.splitlines()
    groups = [line.removesuffix(":") for line in lines if re.match(r"^[A-Z].*:$", line)]
    assert groups == [
        "Configuration file",
        "Model",
        "Network (what is trained)",
        "IP-Adapter (network_type = ip_adapter)",
        "Data",
        "Run",
        "Optimizer",
        "Learning-rate schedule",
        "Objective",
        "Gradient guardian",
        "Rescue",
        "Autopsy",
        "Validation",
        "Samples while training",
        "Metadata of the file",
        "Upload (only with huggingface_repo_id)",
        "Log",
    ]


def test_every_option_has_its_line_of_sense_and_its_default() -> None:
    text = run_program("train", "--help", COLUMNS="110").stdout
    entries = re.split(r"^  (?=--)", text, flags=re.MULTILINE)[1:]
    by_name = {re.match(r"--(\w+)", entry)[1]: " ".join(entry.split()) for entry in entries}  # type: ignore[index]
    for name, default in DEFAULTS.items():
        entry = by_name[name]
        assert len(entry) > len(name) + 20
        if name in ("pretrained_model_name_or_path", "output_dir"):
            assert "Required." in entry
            continue
        shown = {"None": "not set", "False": "off", "True": "on", "[]": "none", "": '""'}.get(
            str(default), str(default)
        )
        assert f"[default: {shown}]" in entry


def test_the_program_lists_its_commands() -> None:
    text = run_program("--help").stdout
    assert re.findall(r"^  ([a-z][\w-]+) ", text, re.MULTILINE) == [
        "quickstart",
        "train",
        "check",
        "plot-schedule",
        "probe",
        "generate",
        "inspect",
        "diff",
        "merge",
        "extract",
        "resize",
        "convert",
        "report",
        "replay",
        "autopsy",
        "optimizers",
    ]
    assert run_program().stdout == text
    assert run_program("--version").stdout.strip() == __version__


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    done = run_program(command, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"Usage: maulstick {command}")


def test_check_shows_its_json_switch_and_train_has_none() -> None:
    assert re.search(r"^  --json ", run_program("check", "--help").stdout, re.MULTILINE)
    assert "--json" not in run_program("train", "--help").stdout


def test_a_reader_that_stops_reading_is_no_error() -> None:
    source = Path(__file__).parents[1] / "src"
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "maulstick", "train", "--help"],
        stdout=write_end,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(source)},
        check=False,
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, b"")


# ---------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["trian"], 'Unknown command "trian". Did you mean "train"?'),
        (
            ["train", "--netwrok_dim", "3"],
            "Unknown option '--netwrok_dim' (command line). Did you mean '--network_dim'?",
        ),
        (
            ["check", "--netwrok_dim", "3"],
            "Unknown option '--netwrok_dim' (command line). Did you mean '--network_dim'?",
        ),
        (["train"], "No base model was named. Give pretrained_model_name_or_path"),
        (["train", "--json", *REQUIRED], "Unknown option '--json'"),
        (["optimizers", "--jsn"], "Unknown option: --jsn. Did you mean --json?"),
        (["quickstart", "a", "b"], "Unused Tokens: ['b']. `maulstick quickstart --help` shows what there is."),
    ],
)
def test_errors_are_one_plain_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"maulstick: error: {message}")
    assert err.count("\n") == 1


def test_errors_are_not_wrapped_in_a_narrow_terminal() -> None:
    done = run_program("train", *REQUIRED, "--lr_warmup_steps", "100", COLUMNS="40")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Use lr_scheduler = constant_with_warmup, or set lr_warmup_steps to 0.\n" in done.stderr
    assert len(done.stderr.splitlines()) == 1


# ---------------------------------------------------------------------------------------- what commands are given


class Recorder:
    """Stands in for the module behind a command and keeps what it was called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: str, function: str, result: Any = 0):
        self.calls: list[tuple[Any, ...]] = []
        self.result = result
        stand_in = ModuleType(module)
        setattr(stand_in, function, self)
        monkeypatch.setitem(sys.modules, module, stand_in)

    def __call__(self, *arguments: Any) -> Any:
        self.calls.append(arguments)
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


def test_train_is_given_the_loaded_options(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch, "maulstick.train.run", "run_training", 3)
    assert main(["train", *REQUIRED, "--network_dim", "16", "--xformers"]) == 3
    assert main(["train", *REQUIRED, "--no-report"]) == 3
    (loaded, when_closed), (_, nothing) = recorder.calls
    assert callable(when_closed)
    assert nothing is None
    assert isinstance(loaded, LoadedOptions)
    assert loaded.options.network.network_dim == 16
    assert loaded.notices[0].startswith("Without effect here: xformers")


@pytest.mark.parametrize("place", [0, 6])
def test_check_takes_the_same_options_and_json(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    recorder = Recorder(monkeypatch, CHECK_MODULE, "check_command")
    assert main(["check", *REQUIRED[:place], "--json", *REQUIRED[place:]]) == 0
    assert main(["check", *REQUIRED, "--seed", "1"]) == 0
    assert main(["check", *REQUIRED[:4], "--no-dry_step"]) == 0
    assert [flags for _, *flags in recorder.calls] == [[True, True], [False, True], [False, False]]
    assert recorder.calls[1][0].options.run.seed == 1


def test_quickstart_and_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    quickstart = Recorder(monkeypatch, "maulstick.tools.quickstart", "run_quickstart")
    optimizers = Recorder(monkeypatch, "maulstick.train.optim", "list_optimizers_command")
    assert (
        main(["quickstart"])
        == main(["quickstart", "here"])
        == main(["optimizers"])
        == main(["optimizers", "--json"])
        == 0
    )
    assert quickstart.calls == [(Path("maulstick-quickstart"),), (Path("here"),)]
    assert optimizers.calls == [(False,), (True,)]


@pytest.mark.parametrize(
    "raised, status, said",
    [
        (DataError("image a.png cannot be read"), 2, "maulstick: error: image a.png cannot be read\n"),
        (KeyboardInterrupt(), 130, "maulstick: interrupted\n"),
        (
            OSError(28, "No space left on device", "out/last.safetensors"),
            2,
            "maulstick: error: out/last.safetensors: No space left on device. Make room on the disk, or name a "
            "folder on another one.\n",
        ),
        (
            OSError(5, "Input/output error", "a.png"),
            2,
            "maulstick: error: a.png: Input/output error. Look at that file or folder, or name another one.\n",
        ),
        (
            type("OutOfMemoryError", (RuntimeError,), {})("Tried to allocate 2 GiB.\nmore"),
            2,
            "maulstick: error: Tried to allocate 2 GiB. Use less memory: gradient_checkpointing, mixed_precision bf16, "
            "cache_latents, a lower train_batch_size or resolution; or close what else uses the device.\n",
        ),
    ],
)
def test_how_a_command_ends(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    raised: BaseException,
    status: int,
    said: str,
) -> None:
    Recorder(monkeypatch, "maulstick.train.run", "run_training", raised)
    assert main(["train", *REQUIRED]) == status
    assert capsys.readouterr().err == said


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    Recorder(monkeypatch, "maulstick.train.run", "run_training", ZeroDivisionError("defect"))
    with pytest.raises(ZeroDivisionError, match="defect"):
        main(["train", *REQUIRED])
    Recorder(monkeypatch, "maulstick.train.run", "run_training", RuntimeError("defect"))
    with pytest.raises(RuntimeError, match="defect"):
        main(["train", *REQUIRED])


def test_optimizers_json_is_json() -> None:
    done = run_program("optimizers", "--json")
    assert "AdamW" in {row["name"] for row in json.loads(done.stdout)}


def test_the_app_can_be_built_twice() -> None:
    assert build_app() is not build_app()
