"""Which caption each image of a folder gets, and what is odd about the caption files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from maulstick.data.captions import CAPTION_EXTENSIONS, CaptionError, CaptionText, read_caption
from maulstick.data.findings import Finding, Severity, counted, names
from maulstick.data.scan import FolderContents
from maulstick.options.dataset_config import SubsetSpec


@dataclass(frozen=True)
class AssignedCaption:
    """The caption lines of an image (at least one, which may be ""), and the file they come from, if any."""

    lines: tuple[str, ...]
    file: Path | None


def caption_extensions(subset: SubsetSpec) -> tuple[str, ...]:
    """Return the extensions looked for, in lower case, in order."""
    return tuple(dict.fromkeys((subset.caption_extension.lower(), *CAPTION_EXTENSIONS)))


def assign_captions(subset: SubsetSpec, contents: FolderContents) -> tuple[dict[Path, AssignedCaption], list[Finding]]:
    """Return each image's caption: from the file of its name, else the class tokens (as sd-scripts does), else ""."""
    extensions = caption_extensions(subset)
    fallback = AssignedCaption((subset.class_tokens or "",), None)
    assigned: dict[Path, AssignedCaption] = {}
    texts: dict[Path, CaptionText | CaptionError] = {}
    second_files: list[Path] = []
    without: list[Path] = []
    for image in contents.images:
        files = contents.captions.get(image.stem, {})
        found = [files[extension] for extension in extensions if extension in files]
        if not found:
            without.append(image)
            assigned[image] = fallback
            continue
        second_files += [file for file in found[1:] if file not in second_files]
        if found[0] not in texts:
            texts[found[0]] = _read(found[0])
        text = texts[found[0]]
        assigned[image] = AssignedCaption(text.lines or ("",), found[0]) if isinstance(text, CaptionText) else fallback
    findings = _text_findings(subset, texts)
    if without:
        findings.append(_without_caption(subset, extensions, without, len(contents.images)))
    if second_files:
        message = (
            f"'{subset.image_dir.name}': {names(second_files)} not used, "
            f"because a caption file with an extension that goes first ({', '.join(extensions)}) is there too."
        )
        findings.append(Finding(Severity.INFO, "second_caption_file", tuple(second_files), message))
    findings += _shared_captions(subset, assigned)
    return assigned, findings


def _read(file: Path) -> CaptionText | CaptionError:
    try:
        return read_caption(file)
    except CaptionError as error:
        return error


def _used_instead(subset: SubsetSpec) -> str:
    if subset.class_tokens:
        return f"the caption '{subset.class_tokens}' (the class tokens of the folder)"
    return "an empty caption (the folder has no class tokens)"


def _without_caption(subset: SubsetSpec, extensions: Sequence[str], images: Sequence[Path], total: int) -> Finding:
    verb = "has" if len(images) == 1 else "have"
    message = (
        f"'{subset.image_dir.name}': {len(images)} of {counted(total, 'image')} {verb} no caption file "
        f"({', '.join(extensions)}) and {'is' if len(images) == 1 else 'are'} trained with "
        f"{_used_instead(subset)}: {names(images)}"
    )
    return Finding(Severity.WARNING, "image_without_caption", tuple(images), message)


def _text_findings(subset: SubsetSpec, texts: dict[Path, CaptionText | CaptionError]) -> list[Finding]:
    where = f"'{subset.image_dir.name}'"
    findings = []
    kinds: dict[str, list[Path]] = defaultdict(list)
    for file, text in texts.items():
        if isinstance(text, CaptionError):
            message = (
                f"{where}: the caption file {file.name} {text.reason}: its image is trained with "
                f"{_used_instead(subset)}. Save the file as UTF-8."
            )
            findings.append(Finding(Severity.ERROR, "caption_unreadable", (file,), message))
            continue
        if not text.lines:
            kinds["caption_empty"].append(file)
        if len(text.lines) > 1:
            kinds["caption_lines"].append(file)
        if text.had_mark:
            kinds["caption_byte_order_mark"].append(file)
    messages = {
        "caption_empty": (Severity.WARNING, "without text: trained as an empty caption"),
        "caption_lines": (Severity.WARNING, "with more than one line: only the first line that has text is used"),
        "caption_byte_order_mark": (Severity.INFO, "with a byte order mark, which is left out"),
    }
    for code, (severity, text_of_it) in messages.items():
        files = kinds[code]
        if files:
            message = f"{where}: {counted(len(files), 'caption file')} {text_of_it} ({names(files)})."
            findings.append(Finding(severity, code, tuple(files), message))
    return findings


def _shared_captions(subset: SubsetSpec, assigned: dict[Path, AssignedCaption]) -> list[Finding]:
    by_file: dict[Path, list[Path]] = defaultdict(list)
    for image, caption in assigned.items():
        if caption.file is not None:
            by_file[caption.file].append(image)
    return [
        Finding(
            Severity.WARNING,
            "shared_caption",
            (*images, file),
            f"'{subset.image_dir.name}': {names(images)} differ in their extension only and share the caption file "
            f"{file.name}: all of them are used, with the same caption.",
        )
        for file, images in by_file.items()
        if len(images) > 1
    ]
