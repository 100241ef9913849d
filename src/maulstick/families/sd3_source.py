"""Where the parts of an SD3 model lie: in a diffusers folder, or in an original file and others beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from maulstick.errors import ModelError, OptionError
from maulstick.families.configs import (
    TOKENIZER_FOLDER,
    fit_joint_transformer,
    fit_t5,
    fit_text_encoder,
    fit_vae,
    shipped_config,
)
from maulstick.families.ldm_keys import UNET_PREFIX, VAE_PREFIX, vae_weights
from maulstick.families.recognise import read_json
from maulstick.families.sd3_keys import TEXT_PREFIXES, clip_weights, t5_weights, transformer_weights
from maulstick.families.source import (
    TEXT_ENCODER_STEMS,
    Component,
    Kind,
    ModelSource,
    checked_tokenizer,
    clip_in_folder,
    find_weights,
    folder_component,
    notes_on_unknown_tensors,
    open_vae,
)
from maulstick.options.schema import ModelOptions
from maulstick.weight_files import WeightFile, open_weights

MODEL: Kind = "sd3"
T5 = "text_encoder_3"
_TOKENIZERS = {"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2", T5: "tokenizer_3"}
_OPTIONS = {"text_encoder": "clip_l", "text_encoder_2": "clip_g", T5: "t5xxl"}
_PAD_TOKENS = {"text_encoder_2": "!"}


def open_sd3(found: Path | WeightFile, options: ModelOptions) -> ModelSource:
    """Open a folder or file that was recognised as SD3, with the text encoders that the options name or leave out.

    Raises:
        OptionError: options contradict each other, or a file of a text encoder is something else.
        ModelError: a part is missing or damaged.
    """
    if options.no_t5xxl and (options.t5xxl or options.t5xxl_max_token_length is not None):
        other = "t5xxl" if options.t5xxl else "t5xxl_max_token_length"
        raise OptionError(f"no_t5xxl and {other} contradict each other: one leaves T5 out. Remove one of them.")
    source = _open_folder(found, options) if isinstance(found, Path) else _open_file(found, options)
    path = source.path
    named = {name: getattr(options, option) for name, option in _OPTIONS.items()}
    for name, given in named.items():
        if given:
            source = _with_encoder(source, name, Path(given).expanduser())
    if options.no_t5xxl and T5 in source.text_encoders:
        source = _without_t5(source)
    absent = [option for name, option in _OPTIONS.items() if name != T5 and name not in source.text_encoders]
    if absent:
        raise ModelError(
            f"{path} has no text encoder {' and no '.join(absent)}. Name its file with {' and '.join(absent)}, or use "
            "a model file that has it."
        )
    if T5 in source.text_encoders and T5 not in source.tokenizer_folders:
        raise ModelError(
            f"{path}: T5 is there, but its tokenizer is not, and a single file has none. Name a diffusers folder with "
            "text_encoder_3 and tokenizer_3 in t5xxl, or leave T5 out with no_t5xxl."
        )
    if T5 not in source.text_encoders and options.t5xxl_max_token_length is not None:
        raise OptionError(
            f"t5xxl_max_token_length is given, but {path} has no T5. Name one with t5xxl, or remove the option."
        )
    if T5 in source.text_encoders:
        return source
    note = "Without T5: its part of the text is zeros, as the model has seen it at times."
    return replace(source, notes=(*source.notes, note))


def _open_folder(folder: Path, options: ModelOptions) -> ModelSource:
    encoders: dict[str, Component] = {}
    for name in ("text_encoder", "text_encoder_2"):
        if (folder / name).is_dir():
            encoders[name] = clip_in_folder(folder / name, with_projection=True)
    tokenizers = {name: checked_tokenizer(folder / _TOKENIZERS[name]) for name in ("text_encoder", "text_encoder_2")}
    if (folder / T5).is_dir() and not options.no_t5xxl and not options.t5xxl:
        encoders[T5] = _t5_in_folder(folder / T5)
    if (folder / _TOKENIZERS[T5]).is_dir():
        tokenizers[T5] = folder / _TOKENIZERS[T5]
    return ModelSource(
        path=folder,
        kind="sd3",
        denoiser=folder_component(folder / "transformer"),
        vae=folder_component(folder / "vae"),
        text_encoders=encoders,
        tokenizer_folders=tokenizers,
        scheduler_config=read_json(folder / "scheduler" / "scheduler_config.json"),
        states_prediction_type=True,
    )


def _open_file(file: WeightFile, options: ModelOptions) -> ModelSource:
    if not any(name.startswith(f"{UNET_PREFIX}joint_blocks.") for name in file.shapes):
        raise ModelError(
            f"{file.path} is an SD3 transformer alone. A whole checkpoint (names begin with {UNET_PREFIX} and "
            f"{VAE_PREFIX}) or a diffusers folder is needed."
        )
    vae, transformer = _vae(file, options), transformer_weights(file)
    encoders = {
        name: _encoder_in_file(file, name, prefix)
        for name, prefix in TEXT_PREFIXES.items()
        if any(tensor.startswith(prefix) for tensor in file.shapes) and not (name == T5 and options.no_t5xxl)
    }
    return ModelSource(
        path=file.path,
        kind="sd3",
        denoiser=Component(fit_joint_transformer(shipped_config(MODEL, "transformer"), transformer), transformer),
        vae=vae,
        text_encoders=encoders,
        tokenizer_folders=dict.fromkeys(("text_encoder", "text_encoder_2"), TOKENIZER_FOLDER),
        scheduler_config=shipped_config(MODEL, "scheduler"),
        states_prediction_type=False,
        pad_tokens=_PAD_TOKENS,
        notes=notes_on_unknown_tensors(file, ("text_encoders.",)),
    )


def _vae(file: WeightFile, options: ModelOptions) -> Component:
    if any(name.startswith(VAE_PREFIX) for name in file.shapes):
        weights = vae_weights(file)
        return Component(fit_vae(shipped_config(MODEL, "vae"), weights), weights)
    if options.vae:
        return open_vae(Path(options.vae).expanduser(), MODEL)
    raise ModelError(f"{file.path} has no VAE (no tensor named {VAE_PREFIX}…). Name one with vae.")


def _encoder_in_file(file: WeightFile, name: str, prefix: str) -> Component:
    config = shipped_config(MODEL, name)
    if name == T5:
        weights = t5_weights(file, prefix)
        return Component(fit_t5(config, weights), weights)
    weights = clip_weights(file, prefix)
    return Component(fit_text_encoder(config, weights), weights)


def _t5_in_folder(folder: Path) -> Component:
    return Component(
        read_json(folder / "config.json"), t5_weights(open_weights(find_weights(folder, TEXT_ENCODER_STEMS)), "")
    )


def _with_encoder(source: ModelSource, name: str, path: Path) -> ModelSource:
    """Return the source with the text encoder that lies at ``path`` in the place of its own."""
    option = _OPTIONS[name]
    if not path.exists():
        raise ModelError(f"The text encoder {path} ({option}) does not exist.")
    tokenizers: Mapping[str, Path] = source.tokenizer_folders
    if path.is_dir():
        if name != T5 or not (path / T5).is_dir() or not (path / _TOKENIZERS[T5]).is_dir():
            wanted = "a file, or a folder with text_encoder_3 and tokenizer_3" if name == T5 else "a file"
            raise OptionError(f"{option} = {path}: expected {wanted}.")
        component, tokenizers = _t5_in_folder(path / T5), {**tokenizers, T5: path / _TOKENIZERS[T5]}
    else:
        file = open_weights(path)
        _refuse_other_encoder(file, name)
        component = _encoder_in_file(file, name, "")
    encoders = {**source.text_encoders, name: component}
    # In the order of their key prefixes.
    ordered = {key: encoders[key] for key in _OPTIONS if key in encoders}
    return replace(source, text_encoders=ordered, tokenizer_folders=tokenizers)


def _refuse_other_encoder(file: WeightFile, name: str) -> None:
    is_t5 = any(tensor.startswith("encoder.block.") for tensor in file.shapes)
    layers = "text_model.encoder.layers."
    is_clip = any(tensor.startswith(layers) for tensor in file.shapes)
    deep = f"{layers}12.mlp.fc1.weight" in file.shapes
    fits = {"text_encoder": is_clip and not deep, "text_encoder_2": is_clip and deep, T5: is_t5}
    if not fits[name]:
        is_what = next((_OPTIONS[other] for other, holds in fits.items() if holds), None)
        found = f"it is a {is_what}" if is_what else f"it holds {', '.join(sorted(file.shapes)[:2])}, …"
        raise OptionError(f"{_OPTIONS[name]} = {file.path}: that is no {_OPTIONS[name]}; {found}.")


def _without_t5(source: ModelSource) -> ModelSource:
    kept = {name: part for name, part in source.text_encoders.items() if name != T5}
    return replace(source, text_encoders=kept)
