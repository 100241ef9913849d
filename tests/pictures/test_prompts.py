"""Prompt lines with sd-scripts' options."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maulstick.pictures.prompts import (
    Prompt,
    PromptError,
    check_prompts,
    default_prompt,
    parse_prompt,
    read_prompts,
)


def test_every_option_is_read() -> None:
    line = "a cat, (sitting:1.2) --n blurry, low-res --w 512 --h 768 --d 42 --l 7.5 --s 28 --ss k_euler_a"
    assert parse_prompt(line) == Prompt(
        "a cat, (sitting:1.2)",
        negative="blurry, low-res",
        width=512,
        height=768,
        seed=42,
        scale=7.5,
        steps=28,
        sampler="euler_a",
    )


@pytest.mark.parametrize(
    "line, text",
    [
        ("a cat", "a cat"),
        ("  a   cat  ", "a   cat"),
        ("", ""),
        ("--s 3", ""),
        ("left -- right", "left -- right"),
        ("black-and--white photo", "black-and--white photo"),
    ],
)
def test_text_is_kept_as_it_is_written(line: str, text: str) -> None:
    assert parse_prompt(line).text == text


@pytest.mark.parametrize("given_size, used", [("64", 64), ("70", 64), ("8", 64), ("519", 512), ("1024", 1024)])
def test_sizes_are_cut_to_what_the_model_can_draw_and_that_is_said(given_size: str, used: int) -> None:
    prompt = parse_prompt(f"a --w {given_size} --h {given_size}").fitted(8)
    assert (prompt.width, prompt.height) == (used, used)
    said = "drawn as {}: sides are multiples of 8, 64 at least"
    expected = [f"{side} {given_size} is {said.format(used)}" for side in ("width", "height")]
    assert list(prompt.notes) == (expected if int(given_size) != used else [])


def test_another_model_has_other_sizes_and_what_is_open_stays_open() -> None:
    assert (parse_prompt("a --w 72").fitted(8).width, parse_prompt("a --w 72").fitted(16).width) == (72, 64)
    assert parse_prompt("a").fitted(16) == Prompt("a")


def test_embedded_guidance_is_read_and_reported_as_unused() -> None:
    prompt = parse_prompt("a cat --g 3.5 --s 4")
    assert prompt.steps == 4
    assert "--g 3.5 is not used" in prompt.notes[0]
    assert "--l" in prompt.notes[0]


@pytest.mark.parametrize(
    "option, said",
    [
        ("--sampler euler", r"unknown prompt option '--sampler'"),
        ("<lora:mycat:0.8> --w 64", r"names no LoRA here: remove <lora:mycat:0\.8>\..* --lora FILE:WEIGHT"),
        ("--w wide", r"--w expects a size in pixels, but has 'wide'"),
        ("--h", r"--h expects a size in pixels, but has 'nothing'"),
        ("--s 0", r"--s expects a number of steps of at least 1"),
        ("--s 2.5", r"--s expects a number of steps"),
        ("--d -1", r"--d expects a whole number"),
        ("--d 9223372036854775808", r"--d expects a whole number from 0 to 9223372036854775807"),
        ("--l high", r"--l expects a number"),
        ("--l nan", r"--l expects a number"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(option: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text(f"# first\n\na dog\na cat {option}\n")
    with pytest.raises(PromptError, match=said) as raised:
        read_prompts(path)
    assert str(raised.value).startswith(f"{path}, line 4: ")


def test_a_file_gives_its_prompts_without_comments_and_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffa cat --d 1\r\n\r\n  # not drawn\r\nein Hund, süß\r\n".encode())
    assert read_prompts(path) == [Prompt("a cat", seed=1), Prompt("ein Hund, süß")]


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("p.txt", b"# nothing\n\n", "holds no prompt"),
        ("p.txt", b"\xff\xfe\x00a", "not UTF-8"),
        ("p.toml", b"[prompt]", r"p\.toml is no table of prompts. Write a table .prompt. for what all share"),
        ("p.toml", b"[prompt", r"is no TOML: "),
        ("p.toml", b"[prompt]\n[[prompt.subset]]\nseed = 1", r"prompt.subset 1 has no text"),
        (
            "p.toml",
            b"[prompt]\n[[prompt.subset]]\nprompt='a'\nsample_step = 1",
            "unknown key 'sample_step'. Did you mean 'sample_steps'",
        ),
        (
            "p.toml",
            b"[prompt]\nseed = true\n[[prompt.subset]]\nprompt='a'",
            "seed expects a number or a text, but has true",
        ),
        (
            "p.toml",
            b"[prompt]\nwidth = 1.5\n[[prompt.subset]]\nprompt='a'",
            "width expects a size in pixels, but has 1.5",
        ),
        ("p.json", b"{}", r"p\.json is no list of prompts"),
        ("p.json", b"[", r"is no JSON"),
        ("p.json", b"[3]", r"prompt 1 is 3. Write a list"),
        ("p.json", b'["a --q 1"]', r"prompt 1: unknown prompt option '--q'"),
        ("p.json", b'[{"prompt": "a <lora:b:1>"}]', r"prompt 1: a prompt names no LoRA here: remove <lora:b:1>"),
        ("p.json", b'[{"prompt": "a", "controlnet_image": "x"}]', "drawn without ControlNet. Remove it"),
        ("p.txt", b"a --cn x.png", "line 1: --cn: pictures are drawn without ControlNet"),
    ],
)
def test_unusable_files_say_why(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PromptError, match=said):
        read_prompts(tmp_path / name)
    with pytest.raises(PromptError, match="cannot be read: No such file"):
        read_prompts(tmp_path / "absent.txt")


def test_what_a_prompt_leaves_open_is_filled_in_and_what_it_says_stays() -> None:
    defaults = default_prompt(512)
    assert defaults == Prompt("", negative="", width=512, height=512, scale=7.5, steps=30)
    assert default_prompt(768).width == 512
    assert default_prompt(64).height == 64
    assert default_prompt(1024).height == 1024
    whole = Prompt("a", steps=5, scale=0.0, negative="").completed(
        Prompt("", negative="x", steps=30, scale=7.5, seed=3)
    )
    assert whole == Prompt("a", negative="", steps=5, scale=0.0, seed=3)


def test_a_sampler_that_there_is_not_is_refused() -> None:
    check_prompts([Prompt("a", sampler="euler"), Prompt("b")], ["euler", "ddim"])
    with pytest.raises(PromptError, match=r"'b' asks for sampler 'eulr'.*Did you mean 'euler'\?"):
        check_prompts([Prompt("b", sampler="eulr")], ["euler", "ddim"])


@given(
    text=st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1).filter(lambda text: "--" not in text),
    width=st.integers(8, 512).map(lambda eighths: eighths * 8),
    seed=st.integers(0, 2**32),
    steps=st.integers(1, 500),
    scale=st.decimals(0, 50, places=2),
)
def test_what_is_written_is_what_is_read(text: str, width: int, seed: int, steps: int, scale: object) -> None:
    prompt = parse_prompt(f"{text} --n no {text} --w {width} --d {seed} --s {steps} --l {scale}")
    assert prompt == Prompt(text, negative=f"no {text}", width=width, seed=seed, steps=steps, scale=float(str(scale)))


def test_prompts_are_read_without_torch() -> None:
    program = "import sys, maulstick.pictures.prompts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, env=_environment()).returncode == 0


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": ":".join(path for path in sys.path if path)}


def test_tables_say_the_same_as_lines(tmp_path: Path) -> None:
    """The keys of sd-scripts; what all share stands in [prompt], and a subset may say otherwise."""
    (tmp_path / "p.txt").write_text(
        "a cat --n blurry --w 512 --h 768 --d 42 --l 7.5 --s 30\n"
        "a dog --n blurry --W 64 --h 768 --d 1 --l 7 --SS k_euler_a\n"
    )
    (tmp_path / "p.toml").write_text(
        """
        [prompt]
        negative_prompt = "blurry"
        width = 512
        height = 768
        scale = 7.5
        [[prompt.subset]]
        prompt = "a cat"
        seed = 42
        sample_steps = 30
        [[prompt.subset]]
        prompt = "a dog"
        width = 64
        seed = 1
        scale = 7
        sample_sampler = "k_euler_a"
        """
    )
    entry = {"prompt": "a cat", "negative_prompt": "blurry", "width": 512, "height": 768, "seed": 42, "scale": 7.5}
    line = "a dog --n blurry --w 64 --h 768 --d 1 --l 7 --ss euler_a"
    (tmp_path / "p.json").write_text(json.dumps([{**entry, "sample_steps": 30}, line]))
    lines, toml, tables = (read_prompts(tmp_path / f"p.{ending}") for ending in ("txt", "toml", "json"))
    assert lines == toml == tables
    assert lines[0] == Prompt("a cat", negative="blurry", width=512, height=768, seed=42, scale=7.5, steps=30)
    assert lines[1] == Prompt("a dog", negative="blurry", width=64, height=768, seed=1, scale=7.0, sampler="euler_a")
