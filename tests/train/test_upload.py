"""Uploading to the hub: every saved file, failures that end nothing, a token that is written nowhere."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi

from maulstick.errors import OptionError
from maulstick.options.load import HIDDEN
from maulstick.options.output_schema import UploadOptions
from maulstick.train import upload
from maulstick.train.events import read_events
from maulstick.train.upload import HubUpload
from tests.train.test_loop import UNET_ONLY

TOKEN = "hf_secretSECRETsecret"
REPOSITORY = ("--huggingface_repo_id", "anna/shapes", "--huggingface_token", TOKEN)


class Hub:
    """Stands in for HfApi; ``refuses`` says how many of the next uploads fail."""

    def __init__(self, refuses: int = 0) -> None:
        self.refuses = refuses
        self.token: str | None = None
        self.created: list[dict[str, Any]] = []
        self.files: list[tuple[str, str]] = []
        self.free = threading.Event()
        self.free.set()

    def __call__(self, token: str | None) -> Hub:
        self.token = token
        return self

    def create_repo(self, **arguments: Any) -> None:
        inspect.signature(HfApi.create_repo).bind(None, **arguments)
        self.created.append(arguments)

    def upload_file(self, **arguments: Any) -> None:
        inspect.signature(HfApi.upload_file).bind(None, **arguments)
        assert arguments["repo_id"] == "anna/shapes"
        self.free.wait(10)
        if self.refuses:
            self.refuses -= 1
            raise ConnectionError(f"401 for {TOKEN}\nmore")
        assert Path(arguments["path_or_fileobj"]).stat().st_size > 0
        self.files.append((arguments["path_in_repo"], arguments["repo_type"]))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub()
    monkeypatch.setattr(upload, "_hub_api", made)
    return made


def listening(run: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(run.console, "say", said.append)
    return said


def test_every_saved_file_is_uploaded_and_the_token_is_nowhere(
    hub: Hub, make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ("--huggingface_path_in_repo", "loras/", "--huggingface_repo_visibility", "public")
    run = make_run(*UNET_ONLY, *REPOSITORY, *where, "--save_every_n_steps", "4", "--save_state", "--async_upload")
    said = listening(run, monkeypatch)
    assert TOKEN not in repr(run.loaded)
    assert run.options.upload.huggingface_token == HIDDEN
    run.train()
    assert hub.token == TOKEN
    assert hub.created == [{"repo_id": "anna/shapes", "repo_type": "model", "private": False, "exist_ok": True}]
    assert hub.files == [("loras/last-step00000004.safetensors", "model"), ("loras/last.safetensors", "model")]
    assert "uploaded last.safetensors to anna/shapes as loras/last.safetensors" in said
    uploads = [event for event in read_events(tmp_path / "out" / "last.events.jsonl") if event["event"] == "upload"]
    assert [event["path_in_repo"] for event in uploads] == [name for name, _ in hub.files]
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(written) > 5
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()]
    assert not [line for line in said if TOKEN in line]


def test_without_a_repository_nothing_is_uploaded(hub: Hub, make_run: Any) -> None:
    run = make_run(*UNET_ONLY)
    run.train()
    assert run.saver.upload is None
    assert hub.token is None


def test_what_fails_is_tried_again_at_the_end(
    hub: Hub, make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.refuses = 2
    run = make_run(*UNET_ONLY, *REPOSITORY, "--save_every_n_steps", "2")
    said = listening(run, monkeypatch)
    assert run.train().exit_code == 0
    assert [name for name, _ in hub.files] == [
        "last.safetensors",
        "last-step00000002.safetensors",
        "last-step00000004.safetensors",
    ]
    about = [line for line in said if "upload" in line]
    first = "last-step00000002.safetensors could not be uploaded: ConnectionError: 401 for ...; it is tried again at"
    assert about[0] == f"{first} the end"
    assert about[-1] == "all 3 files are uploaded to anna/shapes on the hub now"
    failed = [event for event in read_events(tmp_path / "out" / "last.events.jsonl") if "failed" in event["event"]]
    assert [event["event"] for event in failed] == ["upload_failed"] * 2
    assert "upload_failed" in (tmp_path / "out" / "last.events.jsonl").read_text()


def test_what_fails_to_the_end_is_named_with_what_to_do(
    hub: Hub, make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.refuses = 99
    run = make_run(*UNET_ONLY, *REPOSITORY)
    said = listening(run, monkeypatch)
    assert run.train().exit_code == 0
    assert [line for line in said if "upload" in line] == [
        "last.safetensors could not be uploaded: ConnectionError: 401 for ...; it is tried again at the end",
        "last.safetensors could not be uploaded: ConnectionError: 401 for ...",
        "not uploaded to anna/shapes on the hub: last.safetensors. The files are in output_dir; upload them with "
        "`hf upload anna/shapes FILE`.",
    ]


def test_a_hub_that_never_answers_ends_nothing(
    hub: Hub, make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "WAIT_FOR_ONE", 0.05)
    monkeypatch.setattr(upload, "WAIT_AT_THE_END", 0.05)
    hub.free.clear()
    run = make_run(*UNET_ONLY, *REPOSITORY, "--save_every_n_steps", "4")
    said = listening(run, monkeypatch)
    assert run.train().path == tmp_path / "out" / "last.safetensors"
    hub.free.set()
    assert "last-step00000004.safetensors is still being uploaded; training goes on meanwhile" in said
    assert (
        "not uploaded to anna/shapes on the hub: last.safetensors. The files are in output_dir; upload them with "
        "`hf upload anna/shapes FILE`." in said
    )


def test_a_file_that_save_last_n_has_removed_is_left_out(tmp_path: Path) -> None:
    hub, said = Hub(), []
    made = HubUpload(UploadOptions(huggingface_repo_id="a/b"), None, said.append, lambda *_, **__: None, make_api=hub)
    made.add(tmp_path / "gone.safetensors")
    made.finish()
    assert (hub.files, made.failed, said) == ([], [], [])


def test_a_repository_needs_both_its_names(make_run: Any) -> None:
    with pytest.raises(OptionError, match="huggingface_repo_id = shapes: give it as NAME/REPO"):
        make_run("--huggingface_repo_id", "shapes")
