"""Every command, Python block and TOML block of README and docs is run; what cannot be is named with the reason."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from maulstick.options.dataset_config import dataset_specs
from maulstick.options.load import load_train_options
from tests.docs.conftest import make_pictures
from tests.docs.desk import prepare, run_command, set_up, small
from tests.docs.documents import COMMAND, NAMES, ROOT, blocks, commands, outside_of_blocks

LANGUAGES = {"sh", "python", "toml", "text"}
TRANSLATIONS = [name for name in NAMES if name.startswith("README.") and name != "README.md"]
SLOW = {"docs/blocks.md": "the model that has all blocks", "docs/first-lora.md": "the quickstart's model"}
"""Documents whose commands take more than a few seconds, and what for."""
RUN_ELSEWHERE = {
    "docs/guardian.md": "tests/guard/test_guard_examples.py",
    "docs/rescue.md": "tests/rescue/test_rescue_examples.py",
}
"""Documents whose Python blocks need more around them; the named tests run every one."""


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    set_up(tmp_path, request.node.callspec.params["document"] if hasattr(request.node, "callspec") else "")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---------------------------------------------------------------------------------------- nothing is left out


@pytest.mark.parametrize("document", NAMES)
def test_every_block_says_what_it_is(document: str) -> None:
    for block in blocks(document):
        assert block.language in LANGUAGES, f"{block.where}: a block is one of {LANGUAGES}"
        if block.language == "text":
            typed = [line for line in block.text.splitlines() if COMMAND.match(line)]
            assert not typed, f"{block.where}: a command belongs into a block of its own (sh): {typed}"
    for number, line in outside_of_blocks(document):
        is_code = line.startswith("    ") and COMMAND.match(line.strip())
        assert not is_code, f"{document}:{number}: a command belongs into a block (sh)"


@pytest.mark.parametrize("document", TRANSLATIONS)
def test_translations_have_the_same_blocks(document: str) -> None:
    original, translated = blocks("README.md"), blocks(document)
    assert [(block.language, block.text) for block in translated] == [(b.language, b.text) for b in original]


@pytest.mark.parametrize("document", TRANSLATIONS)
def test_translations_name_the_same_documents(document: str) -> None:
    original, translated = (
        re.findall(r"\]\((docs/[^)#\s]+)", (ROOT / name).read_text(encoding="utf-8"))
        for name in ("README.md", document)
    )
    assert sorted(translated) == sorted(original)


def test_every_document_is_named_in_the_readme() -> None:
    named = set(re.findall(r"\]\((docs/[^)#\s]+\.md)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert named == {name for name in NAMES if name.startswith("docs/")}


@pytest.mark.parametrize("document", NAMES)
def test_links_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in link:
            assert ((ROOT / document).parent / link).exists(), f"{document}: there is no {link}"


def test_readme_leads_to_every_document() -> None:
    for readme in ("README.md", *TRANSLATIONS):
        text = (ROOT / readme).read_text(encoding="utf-8")
        assert [name for name in NAMES if name.startswith("docs/") and f"]({name})" not in text] == [], readme


# ---------------------------------------------------------------------------------------- shell


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in NAMES
        if name not in TRANSLATIONS and commands(name)
    ],
)
def test_commands_run_in_their_order(document: str, desk: Path) -> None:
    prepare(document, desk)
    for where, words in commands(document):
        run_command(words, where)


@pytest.mark.slow
def test_the_launch_on_two_processes_runs(desk: Path) -> None:
    words = next(words for _, words in commands("docs/several-gpus.md") if "--standalone" in words)
    place = words.index("maulstick")
    command = [sys.executable, "-m", "torch.distributed.run", *words[1 : place + 1], *small(words[place + 1 :])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (desk / "output_dir" / "last.safetensors").exists()


# ---------------------------------------------------------------------------------------- TOML


@pytest.mark.parametrize("document", [name for name in NAMES if name not in TRANSLATIONS and blocks(name, "toml")])
def test_toml_blocks_load(document: str, desk: Path) -> None:
    for block in blocks(document, "toml"):
        file = desk / "block.toml"
        file.write_text(block.text)
        needed = ["--pretrained_model_name_or_path", "model", "--output_dir", "out"]
        if "[[datasets]]" in block.text:
            for folder in re.findall(r'image_dir = "(.+)"', block.text):
                make_pictures(desk / folder, count=1)
            loaded = load_train_options([*needed, "--dataset_config", str(file)])
            assert dataset_specs(loaded.options.dataset), block.where
        else:
            images = [] if "dataset_config" in block.text else ["--train_data_dir", "images"]
            loaded = load_train_options([*needed, *images, "--config_file", str(file)])
            assert dataset_specs(loaded.options.dataset), block.where


# ---------------------------------------------------------------------------------------- Python


def names_for(document: str, desk: Path) -> dict[str, Any]:
    """Return what a document's Python blocks may take for granted."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    data = [(torch.randn(4, 6), torch.randn(4, 2)) for _ in range(8)]
    common: dict[str, Any] = {
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "loss_fn": torch.nn.functional.mse_loss,
        "data": data,
    }
    if document == "README.md":
        return common | {"batches": data, "compute_loss": lambda b: torch.nn.functional.mse_loss(model(b[0]), b[1])}
    if document == "docs/autopsy.md":
        return common | {"batch": data[0][0], "target": data[0][1], "scaler": torch.amp.GradScaler("cpu")}
    if document == "docs/ip-adapter.md":
        from maulstick.families.load import load_family
        from maulstick.options.schema import ModelOptions

        run_command(next(words for _, words in commands(document) if words[1] == "train"), document)
        model_options = ModelOptions(pretrained_model_name_or_path="model")
        return {"pipeline": load_family(model_options, device="cpu", dtype=torch.float32).pipeline("euler")}
    return common


@pytest.mark.parametrize(
    "document",
    [name for name in NAMES if name not in TRANSLATIONS and name not in RUN_ELSEWHERE and blocks(name, "python")],
)
def test_python_blocks_run_in_their_order(document: str, desk: Path) -> None:
    names = names_for(document, desk)
    for block in blocks(document, "python"):
        exec(compile(block.text, block.where, "exec"), names)


@pytest.mark.parametrize("document", RUN_ELSEWHERE)
def test_python_blocks_that_run_elsewhere_are_all_run_there(document: str) -> None:
    assert Path(document).name in (ROOT / RUN_ELSEWHERE[document]).read_text()
