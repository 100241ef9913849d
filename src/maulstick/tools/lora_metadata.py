"""The metadata of a LoRA file in a form that a person can read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

_SHOWN_TAGS = 12
# What a person looks for first, as label -> entries of which the first that is there is shown.
_FACTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("title", ("modelspec.title", "ss_output_name")),
    ("author", ("modelspec.author",)),
    ("description", ("modelspec.description",)),
    ("license", ("modelspec.license",)),
    ("trigger phrase", ("modelspec.trigger_phrase",)),
    ("model version", ("ss_base_model_version", "modelspec.architecture")),
    ("base model", ("ss_sd_model_name",)),
    ("network", ("ss_network_module",)),
    ("rank", ("ss_network_dim",)),
    ("alpha", ("ss_network_alpha",)),
    ("network arguments", ("ss_network_args",)),
    ("images", ("ss_num_train_images",)),
    ("resolution", ("ss_resolution", "modelspec.resolution")),
    ("epochs", ("ss_epoch", "ss_num_epochs")),
    ("steps", ("ss_steps", "ss_max_train_steps")),
    ("learning rate", ("ss_learning_rate",)),
    ("UNet learning rate", ("ss_unet_lr",)),
    ("text encoder learning rate", ("ss_text_encoder_lr",)),
    ("optimizer", ("ss_optimizer",)),
    ("schedule", ("ss_lr_scheduler",)),
    ("clip skip", ("ss_clip_skip", "modelspec.encoder_layer")),
    ("seed", ("ss_seed",)),
    ("date", ("modelspec.date", "ss_training_finished_at")),
    ("merged from", ("modelspec.merged_from",)),
    ("comment", ("ss_training_comment",)),
)


def decoded_metadata(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The entries with those that are JSON objects or lists decoded, sorted by name."""
    return {key: _decoded(value) for key, value in sorted(metadata.items())}


def _decoded(text: str) -> Any:
    if not text.startswith(("{", "[")):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def readable_facts(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Label and text of what matters most in decoded metadata; entries that say nothing are left out."""
    facts: list[tuple[str, str]] = []
    for label, entries in _FACTS:
        value = next((metadata[entry] for entry in entries if _says_something(metadata.get(entry))), None)
        if value is not None:
            facts.append((label, _as_text(value)))
    if tags := _tags(metadata.get("ss_tag_frequency")):
        facts.append(("most frequent tags", tags))
    history = metadata.get("maulstick.history")
    for entry in history if isinstance(history, list) else []:
        facts.append(("history", history_line(entry)))
    return facts


def _says_something(value: Any) -> bool:
    return value not in (None, "", "None", "False", {}, [])


def _as_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={item}" for key, item in value.items())
    return str(value)


def _tags(frequency: Any) -> str:
    """Tags of all folders with their counts, the most frequent ones."""
    counted: Counter[str] = Counter()
    for tags in frequency.values() if isinstance(frequency, Mapping) else []:
        if isinstance(tags, Mapping):
            counted.update({str(tag).strip(): int(count) for tag, count in tags.items()})
    return ", ".join(f"{tag} ({count})" for tag, count in counted.most_common(_SHOWN_TAGS))


def history_line(entry: Any) -> str:
    """One entry of the history in a line."""
    if not isinstance(entry, Mapping):
        return str(entry)
    sources = entry.get("sources", [])
    names = [str(source.get("file", "?")) if isinstance(source, Mapping) else str(source) for source in sources]
    told = {key: value for key, value in entry.items() if key not in ("tool", "version", "date", "sources")}
    parts = [f"{entry.get('date', '')} {entry.get('tool', '')}".strip()]
    if names:
        parts.append(f"from {', '.join(names)}")
    if told:
        parts.append("(" + ", ".join(f"{key} {value}" for key, value in told.items()) + ")")
    return " ".join(parts)
