"""The emoji concepts, their captions and how often each is drawn in training.

A store is `STYLE.npz` with `keys` (Unicode sequences such as `1F34E`) and `images` (uint8, [n, 64, 64, 3]); `concepts.json` beside
it holds the label, tags, group and subgroup of every key. `fetch_images.py` writes both.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

GROUPS_WITH_HELD_OUT_CONCEPTS = (
    "animals & nature",
    "food & drink",
    "objects",
    "smileys & emotion",
    "travel & places",
)
HELD_OUT_CONCEPTS = 40

# What the quickstart prompts for is drawn most often; people, flags and signs are left out: too many, too small at 64 px.
CORE_SUBGROUPS = "smiling affectionate negative hearts mammals fruit vegetables flowers weather".split() + [
    "cat faces",
    "with tongue",
    "concerned",
    "costumed & creatures",
    "other plants",
    "sweets & candy",
    "marine life",
    "birds",
]
CORE_WORDS = (
    "key",
    "book",
    "ball",
    "bell",
    "gift",
    "balloon",
    "crown",
    "taxi",
    "bus",
    "automobile",
    "fire engine",
    "tractor",
    "truck",
)
DRAWN_GROUPS = ("smileys & emotion", "animals & nature", "food & drink")
DRAWN_TRAVEL_SUBGROUPS = ("ground transportation", "water transportation", "air transportation", "weather")
DRAWN_OBJECT_WORDS = (
    *("book", "ball", "hat", "shoe", "key", "lamp", "bell", "guitar", "camera", "phone", "gem", "shirt", "dress"),
    *("crown", "pencil", "candle", "bulb", "umbrella", "envelope", "lock", "drum", "scissors"),
)
DRAWN_ACTIVITY_SUBGROUPS = ("events & holidays", "award medals", "games & hobbies", "sports")


@dataclass(frozen=True)
class Concept:
    """One emoji: its Unicode key, the key without skin tone, its label and tags, its group and subgroup."""

    key: str
    base_key: str
    label: str
    tags: tuple[str, ...]
    group: str
    subgroup: str

    @property
    def is_base(self) -> bool:
        return self.key == self.base_key


def load_concepts(folder: Path) -> dict[str, Concept]:
    """Concepts by key, from `concepts.json` in `folder`."""
    records = json.loads((folder / "concepts.json").read_text(encoding="utf-8"))
    return {key: Concept(key=key, **{**record, "tags": tuple(record["tags"])}) for key, record in records.items()}


def load_store(folder: Path, style: str) -> dict[str, np.ndarray]:
    """Images of one style by key; each uint8 [64, 64, 3]."""
    with np.load(folder / f"{style}.npz") as store:
        return dict(zip((str(key) for key in store["keys"]), store["images"], strict=True))


def held_out_keys(concepts: dict[str, Concept], keys: list[str]) -> list[str]:
    """The 40 concepts the base model is never shown; the same ones in every run."""
    candidates = sorted(
        key for key in keys if concepts[key].is_base and concepts[key].group in GROUPS_WITH_HELD_OUT_CONCEPTS
    )
    return sorted(random.Random(1).sample(candidates, HELD_OUT_CONCEPTS))


def drawing_weight(concept: Concept) -> float:
    """How often training draws this concept, relative to the others; 0 leaves it out."""
    if not concept.is_base:
        return 0.0
    has_word = any(word in concept.label for word in DRAWN_OBJECT_WORDS)
    drawn = (
        concept.group in DRAWN_GROUPS
        or concept.subgroup in DRAWN_TRAVEL_SUBGROUPS
        or (concept.group == "activities" and concept.subgroup in DRAWN_ACTIVITY_SUBGROUPS)
        or (concept.group == "objects" and has_word)
        or ("heart" in concept.label and concept.group == "symbols")
    )
    if not drawn:
        return 0.0
    core = concept.subgroup in CORE_SUBGROUPS or any(word in concept.label.split() for word in CORE_WORDS)
    return 2.0 if core else 0.7


def plain_caption(concept: Concept) -> str:
    return concept.label.replace(":", "")


def random_caption(concept: Concept, rng: random.Random) -> str:
    """The label alone, or half of the time the label with one to three of its tags."""
    if rng.random() < 0.5 or not concept.tags:
        return plain_caption(concept)
    tags = rng.sample(concept.tags, min(len(concept.tags), rng.randint(1, 3)))
    return ", ".join([plain_caption(concept), *tags])
