"""Uploading saved files to the Hugging Face hub, beside the training and never in its way."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maulstick.options.output_schema import UploadOptions

WAIT_FOR_ONE = 60.0
"""Seconds that training waits for an upload without ``async_upload``; it then goes on while that is under way."""
WAIT_AT_THE_END = 900.0
Say = Callable[[str], None]
Record = Callable[..., None]


@dataclass
class HubUpload:
    """Uploads files one after the other in a thread of its own.

    What goes wrong is said and counted; such files are tried once more when the run is over. The thread does not keep
    the program alive: a hub that does not answer cannot hold a run that is done.

    Attributes:
        token: where None, the hub's library takes the stored one; it is cut out of all texts.
        say: told of every file.
        record: writes an event.
    """

    options: UploadOptions
    token: str | None
    say: Say
    record: Record
    make_api: Callable[..., Any] | None = None
    failed: list[Path] = field(default_factory=list)
    uploaded: int = 0
    _waiting: queue.Queue[Path] = field(default_factory=queue.Queue)
    _worker: threading.Thread | None = None
    _api: Any = None
    _is_over: bool = False

    def add(self, path: Path) -> None:
        """Upload a file that was just saved; without ``async_upload`` wait for it, but not for long."""
        self._waiting.put(path)
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="upload", daemon=True)
            self._worker.start()
        if not self.options.async_upload and not self._wait(WAIT_FOR_ONE):
            self.say(f"{path.name} is still being uploaded; training goes on meanwhile")

    def finish(self) -> None:
        """Wait for what is under way, try again what failed, and say what is not there."""
        if self._worker is None:
            return
        if self._waiting.unfinished_tasks and not self._wait(1.0):
            self.say("waiting for uploads; press Ctrl-C to leave them")
        self._wait(WAIT_AT_THE_END)
        again, self.failed, self._is_over = self.failed, [], True
        for path in again:
            self._waiting.put(path)
        in_time = self._wait(WAIT_AT_THE_END)
        missing = sorted({path.name for path in [*self.failed, *([] if in_time else list(self._waiting.queue))]})
        where = f"{self.options.huggingface_repo_id} on the hub"
        if missing or not in_time:
            names = ", ".join(missing) or "the last file"
            self.say(
                f"not uploaded to {where}: {names}. The files are in output_dir; upload them with "
                f"`hf upload {self.options.huggingface_repo_id} FILE`."
            )
        elif again:
            self.say(f"all {self.uploaded} files are uploaded to {where} now")

    def _wait(self, seconds: float) -> bool:
        """Wait until nothing is left to do; return whether that came about in time."""
        until = time.monotonic() + seconds
        while self._waiting.unfinished_tasks:
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True

    def _work(self) -> None:
        while True:
            path = self._waiting.get()
            try:
                self._upload(path)
            except Exception as error:  # of whatever the network is made; the run is worth more
                self._failed(path, error)
            finally:
                self._waiting.task_done()

    def _upload(self, path: Path) -> None:
        options = self.options
        if self._api is None:
            api = (self.make_api or _hub_api)(token=self.token)
            api.create_repo(
                repo_id=options.huggingface_repo_id,
                repo_type=options.huggingface_repo_type,
                private=options.huggingface_repo_visibility == "private",
                exist_ok=True,
            )
            self._api = api
        if not path.exists():
            # save_last_n_* has removed it meanwhile.
            return
        folder = (options.huggingface_path_in_repo or "").strip("/")
        name = f"{folder}/{path.name}" if folder else path.name
        self._api.upload_file(
            path_or_fileobj=str(path),
            path_in_repo=name,
            repo_id=options.huggingface_repo_id,
            repo_type=options.huggingface_repo_type,
        )
        self.uploaded += 1
        self.say(f"uploaded {path.name} to {options.huggingface_repo_id} as {name}")
        self.record("upload", file=path, repo=options.huggingface_repo_id, path_in_repo=name)

    def _failed(self, path: Path, error: Exception) -> None:
        self.failed.append(path)
        lines = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        if self.token:
            text = text.replace(self.token, "...")
        if not self._is_over:
            text += "; it is tried again at the end"
        self.say(f"{path.name} could not be uploaded: {text}")
        self.record("upload_failed", file=path, text=text)


def _hub_api(token: str | None) -> Any:
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    # The terminal has a bar of its own.
    disable_progress_bars()
    return HfApi(token=token)
