"""Prompts with sd-scripts' options behind them: ``a cat --n blurry --w 512 --h 768 --d 42 --l 7.5 --s 30``.

Also its tables of prompts: TOML with ``[prompt]`` and ``[[prompt.subset]]``, and JSON with a list.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from maulstick.errors import OptionError, nearest_name_hint

DEFAULT_SIZE = 512
DEFAULT_STEPS = 30
DEFAULT_SCALE = 7.5
LARGEST_SEED = 2**63 - 1
"""torch takes seeds of 64 bits."""

_SMALLEST_SIZE = 64
_OPTION = re.compile(r"\s--(?=\S)")


class PromptError(OptionError):
    """A prompt, or an option behind it, cannot be used; the message says which line."""


@dataclass(frozen=True)
class Prompt:
    """One picture to draw. What is None takes its default when the model is known (``completed``).

    Attributes:
        text, negative: what the picture should and should not show.
        width, height: in pixels.
        seed: of the starting noise.
        scale: classifier-free guidance; at 1 and below the negative prompt plays no part.
        steps: denoising steps.
        sampler: name of the sampler.
        notes: what was asked for and will not be so, one sentence each.
    """

    text: str
    negative: str | None = None
    width: int | None = None
    height: int | None = None
    seed: int | None = None
    scale: float | None = None
    steps: int | None = None
    sampler: str | None = None
    notes: tuple[str, ...] = ()

    def completed(self, defaults: Prompt) -> Prompt:
        """Return the prompt with everything that it leaves open taken from ``defaults``."""
        open_fields = ("negative", "width", "height", "seed", "scale", "steps", "sampler")
        return replace(self, **{name: getattr(defaults, name) for name in open_fields if getattr(self, name) is None})

    def fitted(self, multiple: int) -> Prompt:
        """Return the prompt with sides that a model can draw: whole multiples of ``multiple`` pixels, from 64 on.

        They are cut, as sd-scripts does, and ``notes`` say so.
        """
        sides: dict[str, Any] = {}
        notes = list(self.notes)
        for name in ("width", "height"):
            given: int | None = getattr(self, name)
            if given is None:
                continue
            side = max(_SMALLEST_SIZE, given // multiple * multiple)
            if side != given:
                rule = f"sides are multiples of {multiple}, {_SMALLEST_SIZE} at least"
                notes.append(f"{name} {given} is drawn as {side}: {rule}")
                sides[name] = side
        return replace(self, **sides, notes=tuple(notes))


def parse_prompt(line: str, *, where: str = "") -> Prompt:
    """Read one prompt with its options.

    ``--n`` negative prompt, ``--w`` width, ``--h`` height, ``--d`` seed, ``--l`` guidance scale, ``--s`` steps,
    ``--ss`` sampler, ``--g`` embedded guidance (which Stable Diffusion 1.x/2.x do not have).

    Args:
        where: begins an error message, such as "prompts.txt, line 3".

    Raises:
        PromptError: an option is unknown or its value is unusable.
    """
    text, *options = _OPTION.split(f" {line.strip()}")
    prompt = Prompt(_without_lora(text.strip(), _prefix(where)))
    for option in options:
        name, _, value = option.strip().partition(" ")
        read = _READERS.get(name.lower())
        if read is None:
            if name.lower() in _ELSEWHERE:
                raise PromptError(f"{_prefix(where)}--{name}: {_ELSEWHERE[name.lower()]}. Remove it.")
            hint = nearest_name_hint(f"--{name}", [f"--{known}" for known in _READERS])
            known = ", ".join(f"--{known}" for known in _READERS)
            raise PromptError(f"{_prefix(where)}unknown prompt option '--{name}'.{hint} Known are: {known}.")
        try:
            prompt = read(prompt, value.strip())
        except ValueError as error:
            given = value.strip() or "nothing"
            raise PromptError(f"{_prefix(where)}--{name} expects {error}, but has '{given}'.") from None
    return prompt


def read_prompts(path: Path) -> list[Prompt]:
    """Read a prompt file: one prompt a line; empty lines and lines that begin with # are left out.

    A ``.toml`` file has a table ``[prompt]`` for what all prompts share, and a ``[[prompt.subset]]`` for each; a
    ``.json`` file a list of such tables or of lines. Their keys are those of sd-scripts.

    Raises:
        PromptError: the file cannot be read, holds no prompt, or a line is wrong; line numbers count from 1.
    """
    text = _read_text(path)
    if path.suffix.lower() == ".toml":
        return _from_toml(path, text)
    if path.suffix.lower() == ".json":
        return _from_json(path, text)
    prompts = [
        parse_prompt(line, where=f"{path}, line {number}")
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not prompts:
        raise PromptError(f"The prompt file {path} holds no prompt. Write one prompt on each line.")
    return prompts


def _without_lora(text: str, prefix: str) -> str:
    """Return the text; the web UI's ``<lora:NAME:1>`` in it would be drawn as words."""
    if found := re.search(r"<lora:[^>]*>?", text):
        raise PromptError(
            f"{prefix}a prompt names no LoRA here: remove {found[0]}. `maulstick generate` takes the file with --lora "
            "FILE:WEIGHT, and sample pictures while training have the LoRA that trains."
        )
    return text


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"The prompt file {path} is not UTF-8 text. Save it as UTF-8.") from error
    except OSError as error:
        raise PromptError(
            f"The prompt file {path} cannot be read: {error.strerror or error}. Look at how the path is written."
        ) from error


def _from_toml(path: Path, text: str) -> list[Prompt]:
    form = "Write a table [prompt] for what all share, and [[prompt.subset]] with prompt = ... for each picture."
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PromptError(f"{path} is no TOML: {error}. {form}") from error
    common = content.get("prompt")
    subsets = common.get("subset") if isinstance(common, Mapping) else None
    if not isinstance(common, Mapping) or not isinstance(subsets, list) or not subsets or len(content) > 1:
        raise PromptError(f"{path} is no table of prompts. {form}")
    shared = {key: value for key, value in common.items() if key != "subset"}
    return [
        _from_table({**shared, **subset}, f"{path}, prompt.subset {number}")
        for number, subset in enumerate(subsets, start=1)
    ]


def _from_json(path: Path, text: str) -> list[Prompt]:
    form = (
        'Write a list of prompts, each a line as in a text file, or an object such as {"prompt": "a cat", "seed": 1}.'
    )
    try:
        content = json.loads(text)
    except ValueError as error:
        raise PromptError(f"{path} is no JSON: {error}. {form}") from error
    if not isinstance(content, list) or not content:
        raise PromptError(f"{path} is no list of prompts. {form}")
    prompts = []
    for number, entry in enumerate(content, start=1):
        where = f"{path}, prompt {number}"
        if not isinstance(entry, str | dict):
            raise PromptError(f"{where} is {json.dumps(entry)}. {form}")
        prompts.append(parse_prompt(entry, where=where) if isinstance(entry, str) else _from_table(entry, where))
    return prompts


def _from_table(table: Mapping[str, Any], where: str) -> Prompt:
    text = table.get("prompt")
    if not isinstance(text, str):
        raise PromptError(f"{where} has no text. Write prompt = and the text in quotes.")
    prompt = Prompt(_without_lora(text.strip(), f"{where}: "))
    for key, value in table.items():
        if key == "prompt":
            continue
        if key not in _TABLE_KEYS:
            if key in _ELSEWHERE:
                raise PromptError(f"{where}, {key}: {_ELSEWHERE[key]}. Remove it.")
            hint = nearest_name_hint(key, _TABLE_KEYS)
            raise PromptError(f"{where}: unknown key '{key}'.{hint} Known are: prompt, {', '.join(_TABLE_KEYS)}.")
        try:
            if isinstance(value, bool | list | dict):
                raise ValueError("a number or a text")
            prompt = _READERS[_TABLE_KEYS[key]](prompt, str(value).strip())
        except ValueError as error:
            raise PromptError(f"{where}: {key} expects {error}, but has {json.dumps(value)}.") from None
    return prompt


def default_prompt(native_size: int) -> Prompt:
    """Return what a prompt leaves open: 30 steps, scale 7.5, and 512 pixels, which models up to 768 draw well.

    Others, smaller ones and those made for 1024 and more, have their own size.
    """
    size = DEFAULT_SIZE if DEFAULT_SIZE < native_size < 2 * DEFAULT_SIZE else native_size
    return Prompt("", negative="", width=size, height=size, scale=DEFAULT_SCALE, steps=DEFAULT_STEPS)


def check_prompts(prompts: Sequence[Prompt], samplers: Sequence[str]) -> None:
    """Raise PromptError for a prompt whose sampler is none of ``samplers``."""
    for prompt in prompts:
        if prompt.sampler is not None and prompt.sampler not in samplers:
            hint = nearest_name_hint(prompt.sampler, samplers)
            raise PromptError(
                f"The prompt '{prompt.text}' asks for sampler '{prompt.sampler}', which there is not.{hint} Known are: "
                f"{', '.join(samplers)}."
            )


def _prefix(where: str) -> str:
    return f"{where}: " if where else ""


def _size(value: str) -> int:
    if not value.isdecimal() or int(value) == 0:
        raise ValueError("a size in pixels")
    return int(value)


def _whole(value: str, what: str, smallest: int) -> int:
    if not value.isdecimal() or int(value) < smallest:
        raise ValueError(what)
    return int(value)


def _seed(value: str) -> int:
    if not value.isdecimal() or int(value) > LARGEST_SEED:
        raise ValueError(f"a whole number from 0 to {LARGEST_SEED}")
    return int(value)


def _number(value: str) -> float:
    number = float(value) if re.fullmatch(r"-?\d+(\.\d*)?|-?\.\d+", value) else None
    if number is None:
        raise ValueError("a number")
    return number


def _sampler(value: str) -> str:
    if not value:
        raise ValueError("the name of a sampler")
    return value.removeprefix("k_")


def _embedded_guidance(prompt: Prompt, value: str) -> Prompt:
    note = f"--g {_number(value):g} is not used: in Stable Diffusion guidance is no input of the model; use --l"
    return replace(prompt, notes=(*prompt.notes, note))


_READERS: dict[str, Callable[[Prompt, str], Prompt]] = {
    "n": lambda prompt, value: replace(prompt, negative=value),
    "w": lambda prompt, value: replace(prompt, width=_size(value)),
    "h": lambda prompt, value: replace(prompt, height=_size(value)),
    "d": lambda prompt, value: replace(prompt, seed=_seed(value)),
    "l": lambda prompt, value: replace(prompt, scale=_number(value)),
    "s": lambda prompt, value: replace(prompt, steps=_whole(value, "a number of steps of at least 1", 1)),
    "ss": lambda prompt, value: replace(prompt, sampler=_sampler(value)),
    "g": _embedded_guidance,
}
_TABLE_KEYS = {
    "negative_prompt": "n",
    "width": "w",
    "height": "h",
    "seed": "d",
    "scale": "l",
    "sample_steps": "s",
    "sample_sampler": "ss",
    "guidance_scale": "g",
}
"""Keys of a table of prompts -> the option behind a prompt that says the same."""
_ELSEWHERE = dict.fromkeys(("cn", "controlnet_image"), "pictures are drawn without ControlNet")
"""What sd-scripts has for other kinds of training."""
