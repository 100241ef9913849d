"""From a command line and a configuration file to the options of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from cyclopts import UNSET, App, CycloptsError, Group, Parameter
from cyclopts.argument import ArgumentCollection

from maulstick.errors import OptionError
from maulstick.options.check import check_train_options
from maulstick.options.config_file import Given, find_config_file, read_config_file
from maulstick.options.schema import TrainOptions, flat_values
from maulstick.options.sd_scripts import (
    SECRETS,
    judge_options,
    take_leftover_tokens,
    unknown_network_argument_error,
    unknown_option_error,
)
from maulstick.options.sd_scripts_table import SD_SCRIPTS_OPTIONS, SUPPORTED_NETWORK_ARGUMENTS, Renamed
from maulstick.options.values import argument_value, convert_toml_value, option_types

ZERO_MEANS_OFF = frozenset(
    {
        "clip_skip",
        "vae_batch_size",
        "network_dropout",
        "rank_dropout",
        "module_dropout",
        "scale_weight_norms",
        "block_lr_zero_threshold",
        "loraplus_lr_ratio",
        "loraplus_unet_lr_ratio",
        "loraplus_text_encoder_lr_ratio",
        "save_every_n_epochs",
        "save_every_n_steps",
        "max_train_epochs",
        "ema_decay",
        "min_snr_gamma",
        "noise_offset",
        "adaptive_noise_scale",
        "multires_noise_iterations",
        "ip_noise_gamma",
        "v_pred_like_loss",
        "min_timestep",
        "sample_every_n_steps",
        "sample_every_n_epochs",
    }
)
"""Options that kohya_ss sets to 0 where it means that they are not used."""


HIDDEN = "(given)"


@dataclass(frozen=True)
class LoadedOptions:
    """The options of a run, and how they came about.

    Attributes:
        options: all values; those that follow from others are filled in: ``network_args`` lists the network arguments
            however they came, ``cache_latents_to_disk`` sets ``cache_latents``, ``logging_dir`` sets ``log_with``, and
            an IP-Adapter ``network_train_unet_only``.
        notices: lines to show the user: options accepted without effect, and the like.
        given: names of the options that the user set.
        config_file: the file that was read, None if there was none.
        secrets: values that must not be written anywhere, by name; ``options`` has ``HIDDEN`` in their place.
    """

    options: TrainOptions
    notices: list[str]
    given: frozenset[str]
    config_file: Path | None
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


def load_train_options(arguments: Sequence[str], *, with_files: bool = True, with_output: bool = True) -> LoadedOptions:
    """Read the options of ``maulstick train``: the command line first, then ``--config_file``, then defaults.

    An empty text means "not given": in a file it changes nothing, on the command line it takes back the file's value.
    Without ``with_files``, model, images and a folder for the results need not be named; without ``with_output``, the
    folder need not.

    Raises:
        OptionError: a name is unknown, a value has the wrong type or is out of range, options contradict each other,
            or something required is missing.
    """
    own, foreign, config_path = _read_command_line(arguments)
    config_file = None if config_path is None else find_config_file(config_path)
    if config_file is not None:
        own_in_file, foreign_in_file = _sort_file_options(read_config_file(config_file))
        own, foreign = own_in_file | own, foreign_in_file | foreign
    # An empty text on the command line takes back what the file says.
    own = _with_network_arguments({name: item for name, item in own.items() if item.value != ""})
    values = {name: item.value for name, item in own.items() if not _is_off(name, item.value)}
    notices = _fill_in(values)
    secrets = {name: str(values[name]) for name in SECRETS & values.keys()}
    options = _built(values | dict.fromkeys(secrets, HIDDEN))
    remark = judge_options(foreign, flat_values(options))
    given = frozenset(name for name in own if name in values)
    notices += ([remark] if remark else []) + check_train_options(
        options, given, with_files=with_files, with_output=with_output
    )
    return LoadedOptions(options, notices, given, config_file, secrets)


# ---------------------------------------------------------------------------------------- the command line


OPTION_STYLE = Parameter(name_transform=str, consume_multiple=True, negative=(), show_env_var=False, show_default=True)
"""Names with underscores as they are, lists without repeating the name, switches without a negative form."""

ConfigFile = Annotated[Path | None, Parameter(group=Group("Configuration file", sort_key=(-1,)))]
Json = Annotated[bool, Parameter(name="json", group=Group("Output", sort_key=(-2,)))]
NO_DRY_STEP = "--no-dry_step"
DryStep = Annotated[bool, Parameter(negative=NO_DRY_STEP, group=Group("Output", sort_key=(-2,)))]


def options_app(name: str, summary: str, *, with_json: bool = False) -> App:
    """Return a command that takes all options of a run and returns them with the configuration file's path.

    Its help also shows ``--json`` where ``with_json`` says so; the command itself reads that switch.
    """
    app = App(
        name=name,
        help=summary,
        help_format="plaintext",
        default_parameter=OPTION_STYLE,
        result_action="return_value",
    )
    app.default(_collect_with_json if with_json else _collect)
    return app


def _collect(
    *,
    config_file: ConfigFile = None,
    options: TrainOptions = TrainOptions(),  # noqa: B008 (frozen)
) -> tuple[TrainOptions, Path | None]:
    """Collect the options.

    Args:
        config_file: TOML file with any of the options below; sections are free. The command line beats it.
    """
    return options, config_file


def _collect_with_json(
    *,
    as_json: Json = False,
    dry_step: DryStep = True,
    config_file: ConfigFile = None,
    options: TrainOptions = TrainOptions(),  # noqa: B008 (frozen)
) -> tuple[TrainOptions, Path | None]:
    """Collect the options.

    Args:
        as_json: Print one JSON object instead of tables.
        dry_step: Measure time and memory on one step, and encode a few images; nothing is written.
        config_file: TOML file with any of the options below; sections are free. The command line beats it.
    """
    return options, config_file


def _read_command_line(arguments: Sequence[str]) -> tuple[dict[str, Given], dict[str, Given], Path | None]:
    """Return what the command line gives: our options, those only sd-scripts has, and the configuration file."""
    given_names: set[str] = set()
    emptied_names: set[str] = set()

    def note_given(app: App, commands: tuple[str, ...], collection: ArgumentCollection) -> None:
        for argument in collection:
            is_empty = all(token.value == "" and token.implicit_value is UNSET for token in argument.tokens)
            if argument.tokens:
                (emptied_names if is_empty else given_names).add(argument.name.removeprefix("--"))
            if is_empty:
                argument.tokens.clear()

    app = options_app("train", "")
    app.help_flags, app.version_flags, app.config = [], [], note_given
    try:
        _, bound, leftover, _ = app.parse_known_args(list(arguments))
    except CycloptsError as error:
        error.verbose = False
        raise OptionError(str(error)) from error
    foreign = take_leftover_tokens(leftover)
    options, config_path = _collect(**bound.arguments)
    values = flat_values(options)
    own = {name: Given(values[name], "command line", True) for name in given_names if name in values}
    own |= {name: Given("", "command line", True) for name in emptied_names if name in values}
    for name in [name for name in foreign if isinstance(SD_SCRIPTS_OPTIONS[name], Renamed)]:
        _rename(name, foreign.pop(name), own)
    return own, foreign, config_path


# ---------------------------------------------------------------------------------------- the configuration file


def _sort_file_options(document: dict[str, Given]) -> tuple[dict[str, Given], dict[str, Given]]:
    """Convert our options of a configuration file, and set those apart that only sd-scripts has."""
    own: dict[str, Given] = {}
    foreign: dict[str, Given] = {}
    for name, item in document.items():
        if name == "config_file":
            raise OptionError(f"config_file ({item.where}): one file cannot name another.")
        if name in option_types():
            if item.value not in ([], {}):
                own[name] = Given(convert_toml_value(name, item.value, item.where), item.where)
        elif name in SD_SCRIPTS_OPTIONS:
            foreign[name] = item
        else:
            raise unknown_option_error(name, item.where)
    for name in [name for name in foreign if isinstance(SD_SCRIPTS_OPTIONS[name], Renamed)]:
        item = foreign.pop(name)
        _rename(name, Given(convert_toml_value(_target(name), item.value, item.where), item.where), own)
    return own, foreign


def _target(name: str) -> str:
    entry = SD_SCRIPTS_OPTIONS[name]
    assert isinstance(entry, Renamed)
    return entry.to


def _rename(name: str, item: Given, own: dict[str, Given]) -> None:
    target = _target(name)
    other = own.get(target)
    if other is not None and other.value != item.value:
        raise OptionError(f"{name} = {item.value} and {target} = {other.value} are the same option. Keep {target}.")
    own[target] = item


# ---------------------------------------------------------------------------------------- what follows from what


def _with_network_arguments(own: dict[str, Given]) -> dict[str, Given]:
    """Spread ``network_args`` over the options that its keys name.

    Where both are given, the command line wins over the file; on the same level, different values are an error.
    """
    if "network_args" not in own:
        return own
    source = own["network_args"]
    spread = dict(own)
    keys = [text.partition("=")[0].strip() for text in source.value]
    repeated = next((key for key in keys if keys.count(key) > 1), None)
    if repeated is not None:
        raise OptionError(f"'{repeated}' stands more than once in network_args ({source.where}). Keep one of them.")
    for text in source.value:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals:
            raise OptionError(f"network_args '{text}' ({source.where}): expected key=value, such as conv_dim=4.")
        if key not in SUPPORTED_NETWORK_ARGUMENTS:
            raise unknown_network_argument_error(key, source.where)
        converted = convert_toml_value(key, argument_value(key, value.strip()), f"network_args, {source.where}")
        direct = own.get(key)
        if direct is not None and direct.on_command_line == source.on_command_line:
            if direct.value != converted:
                raise OptionError(
                    f"{key} = {direct.value} ({direct.where}) and {key}={value} in network_args ({source.where}) "
                    "contradict each other. Keep one of them."
                )
        elif direct is None or source.on_command_line:
            spread[key] = Given(converted, source.where, source.on_command_line)
    return spread


def _is_off(name: str, value: Any) -> bool:
    return name in ZERO_MEANS_OFF and value == 0


def _fill_in(values: dict[str, Any]) -> list[str]:
    """Set what follows from the given values, in place; return what should be said about it."""
    arguments = [f"{key}={_as_argument(values[key])}" for key in SUPPORTED_NETWORK_ARGUMENTS if key in values]
    if arguments or "network_args" in values:
        values["network_args"] = arguments
    if values.get("cache_latents_to_disk"):
        values["cache_latents"] = True
    if values.get("network_type") == "ip_adapter":
        values["network_train_unet_only"] = True
    if "logging_dir" in values and values.get("log_with") is None:
        values["log_with"] = "tensorboard"
        return ["logging_dir is given, so values also go to TensorBoard (log_with = tensorboard), as in sd-scripts."]
    return []


def _as_argument(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) else str(value)


def _built(values: dict[str, Any]) -> TrainOptions:
    groups = {}
    for group_name, group_type in get_type_hints(TrainOptions).items():
        names = [item.name for item in fields(group_type) if item.name in values]
        groups[group_name] = group_type(**{name: values[name] for name in names})
    return TrainOptions(**groups)
