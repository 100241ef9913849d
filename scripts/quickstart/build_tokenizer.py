"""The CLIP tokenizer's vocab.json, merges.txt and tokenizer_config.json from OpenAI's list of byte pairs.

    pip download --no-deps -d WORK open_clip_torch==3.3.0      (MIT; carries the list, also MIT)
    unzip WORK/open_clip_torch-*.whl 'open_clip/bpe_simple_vocab_16e6.txt.gz' -d WORK
    python scripts/quickstart/build_tokenizer.py WORK/open_clip/bpe_simple_vocab_16e6.txt.gz src/maulstick/assets/clip_tokenizer

The vocabulary is, in this order: 256 bytes, the same bytes at a word's end, one entry a merge, the start and the end token.
Checked at the end: "a photo of a cat" must become the ids that every CLIP ViT-L/14 text encoder was trained with.
"""

import argparse
import gzip
import json
from pathlib import Path

VOCABULARY_SIZE = 49408
MERGES = VOCABULARY_SIZE - 2 * 256 - 2
START, END = "<|startoftext|>", "<|endoftext|>"
KNOWN_CAPTION = "a photo of a cat"
KNOWN_IDS = [49406, 320, 1125, 539, 320, 2368, 49407]


def printable_bytes() -> list[str]:
    """A printable character for each byte, in vocabulary order: printable Latin-1 first, then the others as 256, 257, …"""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = 256 - len(printable)
    return [chr(code) for code in (*printable, *range(256, 256 + others))]


def read_merges(path: Path) -> list[str]:
    """The merges CLIP uses: the file's first line is a heading, and its end is not used."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return lines.read().split("\n")[1 : 1 + MERGES]


def build_vocabulary(merges: list[str]) -> list[str]:
    characters = printable_bytes()
    words = [*characters, *(character + "</w>" for character in characters)]
    words += ["".join(merge.split()) for merge in merges]
    return [*words, START, END]


def write_files(merges: list[str], output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    vocabulary = {word: index for index, word in enumerate(build_vocabulary(merges))}
    if len(vocabulary) != VOCABULARY_SIZE:
        raise ValueError(f"{len(vocabulary)} words instead of {VOCABULARY_SIZE}: not CLIP's list of byte pairs")
    config = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": 77,
        "do_lower_case": True,
        "bos_token": START,
        "eos_token": END,
        "unk_token": END,
        "pad_token": END,
    }
    text = json.dumps(vocabulary, ensure_ascii=False, separators=(",", ":"))
    (output / "vocab.json").write_text(text, encoding="utf-8")
    (output / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    (output / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def check(output: Path) -> None:
    from transformers import CLIPTokenizer

    ids = CLIPTokenizer.from_pretrained(output)(KNOWN_CAPTION).input_ids
    if ids != KNOWN_IDS:
        raise ValueError(f"{KNOWN_CAPTION!r} became {ids}, expected {KNOWN_IDS}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("byte_pairs", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    write_files(read_merges(arguments.byte_pairs), arguments.output)
    check(arguments.output)


if __name__ == "__main__":
    main()
