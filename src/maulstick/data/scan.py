"""What lies in the folders: images, captions, and everything that is at the wrong place or of the wrong kind.

Nothing is opened here; the findings come from names alone.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from maulstick.data.captions import CAPTION_EXTENSIONS
from maulstick.data.findings import Finding, Severity, counted, names
from maulstick.data.images import IMAGE_EXTENSIONS, is_image_name
from maulstick.errors import DataError
from maulstick.options.dataset_config import SubsetSpec, parse_folder_name

CACHE_SUFFIX = ".maulstick.safetensors"
"""End of the names of our own cache files, which lie beside the images."""

_OTHER_PICTURES = frozenset(
    {".gif", ".tif", ".tiff", ".heic", ".heif", ".jxl", ".jp2", ".jfif", ".psd", ".svg", ".tga", ".raw", ".dng"}
)
_SYSTEM_FILES = frozenset({".ds_store", "thumbs.db", "desktop.ini"})
_DEPTH_LOOKED_INTO = 4


@dataclass(frozen=True)
class FolderContents:
    """The files directly in one folder, sorted by name.

    Attributes:
        captions: caption files by stem, and by extension in lower case.
        hidden: files whose names start with a dot.
        others: files that are neither images nor captions nor ours.
        folders: visible folders in it.
        dangling: links to something that is not there.
    """

    images: tuple[Path, ...]
    captions: dict[str, dict[str, Path]]
    hidden: tuple[Path, ...]
    others: tuple[Path, ...]
    folders: tuple[Path, ...]
    dangling: tuple[Path, ...] = ()


def look_into(folder: Path, caption_extensions: Iterable[str] = CAPTION_EXTENSIONS) -> FolderContents:
    """List a folder. Raises DataError where it cannot be read."""
    wanted = {extension.lower() for extension in caption_extensions}
    images, hidden, others, folders, dangling = [], [], [], [], []
    captions: dict[str, dict[str, Path]] = {}
    try:
        with os.scandir(folder) as listing:
            entries = sorted((entry.name, entry.is_dir()) for entry in listing)
    except OSError as error:
        raise DataError(f"{folder}: the folder cannot be read ({error.strerror or error}).") from error
    for name, is_folder in entries:
        path = folder / name
        if name.lower() in _SYSTEM_FILES or name.endswith(CACHE_SUFFIX):
            continue
        if name.startswith("."):
            if not is_folder:
                hidden.append(path)
        elif is_folder:
            folders.append(path)
        elif path.is_symlink() and not path.exists():
            dangling.append(path)
        elif is_image_name(path):
            images.append(path)
        elif path.suffix.lower() in wanted:
            captions.setdefault(path.stem, {})[path.suffix.lower()] = path
        else:
            others.append(path)
    return FolderContents(tuple(images), captions, tuple(hidden), tuple(others), tuple(folders), tuple(dangling))


def images_below(folder: Path, depth: int = _DEPTH_LOOKED_INTO) -> dict[Path, tuple[Path, ...]]:
    """Return the images of each folder below ``folder`` that has any, down to ``depth`` levels. Links are left out."""
    found: dict[Path, tuple[Path, ...]] = {}
    if depth == 0:
        return found
    for below in look_into(folder).folders:
        if below.is_symlink():
            continue
        contents = look_into(below)
        if contents.images:
            found[below] = contents.images
        found |= images_below(below, depth - 1)
    return found


# ---------------------------------------------------------------------------------------- folders of image folders


def suggested_folder_name(name: str) -> str:
    """Return a ``REPEATS_name`` for a folder without: a number at either end moves to the front, else it is 10."""
    number = r"x?(?P<repeats>[1-9]\d{0,2})x?"
    for pattern in (rf"{number}[ _-]+(?P<rest>\D.*)", rf"(?P<rest>.*\D)[ _-]+{number}"):
        match = re.fullmatch(pattern, name, re.IGNORECASE)
        if match and (rest := match["rest"].strip(" _-")):
            return f"{match['repeats']}_{rest}"
    return f"10_{name.strip(' _-') or 'name'}"


def root_findings(root: Path, option: str) -> list[Finding]:
    """Return what in ``train_data_dir`` or ``reg_data_dir`` is not used because of its place or its name."""
    contents = look_into(root)
    findings = _dangling_links(root, contents)
    used = [folder for folder in contents.folders if _repeats(folder) is not None]
    if contents.images:
        findings.append(_images_at_top_level(root, option, contents.images, has_image_folders=bool(used)))
    for folder in contents.folders:
        if folder not in used:
            findings += _folder_without_repeats(folder, root, option)
    return findings


def _dangling_links(folder: Path, contents: FolderContents) -> list[Finding]:
    if not contents.dangling:
        return []
    one = len(contents.dangling) == 1
    message = (
        f"'{folder.name}': {counted(len(contents.dangling), 'link')} ({names(contents.dangling)}) "
        f"{'points to something that is' if one else 'point to things that are'} not there: not used. Mend or remove "
        f"{'it' if one else 'them'}."
    )
    return [Finding(Severity.ERROR, "dangling_link", contents.dangling, message)]


def _repeats(folder: Path) -> int | None:
    parsed = parse_folder_name(folder.name)
    return None if parsed is None else parsed[0]


def _images_at_top_level(root: Path, option: str, images: Sequence[Path], *, has_image_folders: bool) -> Finding:
    root = root.resolve()
    found = f"{counted(len(images), 'image')} ({names(images)})"
    lie, are = ("lies", "is") if len(images) == 1 else ("lie", "are")
    if not has_image_folders and (_repeats(root) or 0) > 0:
        message = (
            f"{option} is {root}, which is an image folder itself: {found} {lie} directly in it and {are} not used. "
            f"Give the folder that it lies in: {option} = {root.parent}"
        )
    else:
        target = suggested_folder_name(root.name) if not has_image_folders else "10_name"
        message = (
            f"{found} {lie} directly in {option} ({root}) and {are} not used: images belong in folders below it "
            f"whose names say how often each image is used per epoch. Move {'it' if are == 'is' else 'them'} to "
            f"{root / target}"
        )
    return Finding(Severity.ERROR, "images_at_top_level", tuple(images), message)


def _folder_without_repeats(folder: Path, root: Path, option: str) -> list[Finding]:
    try:
        direct = look_into(folder).images
        below = images_below(folder)
    except DataError as error:
        return [Finding(Severity.ERROR, "folder_unreadable", (folder,), f"{error} Nothing in it is used.")]
    image_folders = {path: images for path, images in below.items() if (_repeats(path) or 0) > 0}
    if not direct and image_folders:
        meant = sorted({path.parent for path in image_folders})
        listed = ", ".join(f"'{path.name}' ({counted(len(images), 'image')})" for path, images in image_folders.items())
        message = (
            f"'{folder.name}' in {option} has no repeat count in its name and holds image folders one level too deep: "
            f"{listed}. They are not used. Give {option} = {meant[0].resolve()}, or move them up into {root}"
        )
        return [Finding(Severity.ERROR, "images_too_deep", tuple(image_folders), message)]
    number_below = sum(map(len, below.values()))
    if not direct and not number_below:
        return []
    new_name = suggested_folder_name(folder.name)
    fix = f"Move its images into '{new_name}'" if (root / new_name).exists() else f"Rename it to '{new_name}'"
    if direct:
        these = f"its {counted(len(direct), 'image')}"
        if number_below:
            these += f" (and {counted(number_below, 'image')} in folders below it)"
    else:
        these = f"{counted(number_below, 'image')} in folders below it"
        fix = f"Move them into {root / new_name}"
    verb = "is" if len(direct) + number_below == 1 else "are"
    message = (
        f"The folder '{folder.name}' in {option} has no repeat count at the start of its name: "
        f"{these} {verb} not used. {fix} (the number says how often each image is used per epoch)."
    )
    return [Finding(Severity.ERROR, "folder_without_repeats", (folder,), message)]


# ---------------------------------------------------------------------------------------- one image folder


def contents_findings(subset: SubsetSpec, contents: FolderContents) -> list[Finding]:
    """Return what in an image folder is not used: images in folders below it, other files, captions without image."""
    folder = subset.image_dir
    findings = _dangling_links(folder, contents)
    try:
        too_deep = images_below(folder)
    except DataError as error:
        too_deep = {}
        findings.append(Finding(Severity.WARNING, "folder_unreadable", (folder,), f"{error} Nothing in it is used."))
    findings += [_images_too_deep(subset, contents, below, images) for below, images in too_deep.items()]
    if not contents.images:
        findings.append(_empty_folder(subset, contents, has_images_below=bool(too_deep)))
    pictures = [path for path in contents.others if path.suffix.lower() in _OTHER_PICTURES]
    if pictures:
        findings.append(
            Finding(
                Severity.WARNING,
                "picture_type_not_supported",
                tuple(pictures),
                f"'{folder.name}': {_by_extension(pictures)} cannot be read and "
                f"{'is' if len(pictures) == 1 else 'are'} not used ({names(pictures)}). Convert to PNG or JPEG.",
            )
        )
    rest = [path for path in contents.others if path not in pictures]
    if rest or contents.hidden:
        kinds = [_by_extension(rest)] if rest else []
        kinds += [counted(len(contents.hidden), "hidden file")] if contents.hidden else []
        message = f"'{folder.name}': {' and '.join(kinds)} not used."
        findings.append(Finding(Severity.INFO, "files_not_used", (*rest, *contents.hidden), message))
    findings += _captions_without_image(subset, contents)
    return findings


def _by_extension(paths: Iterable[Path]) -> str:
    kinds = Counter(path.suffix.lower() for path in paths)
    return ", ".join(counted(number, f"{kind} file" if kind else "file without extension",
                             f"{kind} files" if kind else "files without extension")
                     for kind, number in sorted(kinds.items()))  # fmt: skip


def _images_too_deep(subset: SubsetSpec, contents: FolderContents, below: Path, images: Sequence[Path]) -> Finding:
    folder = subset.image_dir
    shown = below.relative_to(folder.parent)
    verb = "lies" if len(images) == 1 else "lie"
    fix = f"Move {'it' if len(images) == 1 else 'them'} up into {folder}"
    if not contents.images:
        fix += f", or name {below} instead"
    message = (
        f"{counted(len(images), 'image')} ({names(images)}) {verb} in '{shown}', too deep: "
        f"only images directly in an image folder are used. {fix}"
    )
    return Finding(Severity.ERROR, "images_too_deep", tuple(images), message)


def _empty_folder(subset: SubsetSpec, contents: FolderContents, *, has_images_below: bool) -> Finding:
    where = " directly in it" if has_images_below else ""
    known = ", ".join(sorted(IMAGE_EXTENSIONS))
    message = f"The folder '{subset.image_dir.name}' has no image{where} ({known}): nothing of it is used."
    return Finding(Severity.WARNING, "empty_folder", (subset.image_dir,), message)


def _captions_without_image(subset: SubsetSpec, contents: FolderContents) -> list[Finding]:
    stems = {image.stem for image in contents.images}
    file_names = {image.name for image in contents.images}
    orphans = [path for stem, files in contents.captions.items() if stem not in stems for path in files.values()]
    if not orphans:
        return []
    message = (
        f"'{subset.image_dir.name}': {counted(len(orphans), 'caption file')} without an image of the same name "
        f"({names(orphans)}): not used."
    )
    misnamed = [path for path in orphans if path.stem in file_names]
    if misnamed:
        first = misnamed[0]
        message += f" Leave out the image's extension: '{first.name}' must be '{Path(first.stem).stem}{first.suffix}'."
    return [Finding(Severity.WARNING, "caption_without_image", tuple(orphans), message)]
