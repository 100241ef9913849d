"""What is written about the author into files, and where files are uploaded to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cyclopts import Parameter

from maulstick.options import groups


@Parameter(name="*", group=groups.METADATA)
@dataclass(frozen=True, kw_only=True)
class MetadataOptions:
    metadata_title: str | None = None
    """Title in the file's metadata (modelspec.title); without it output_name."""
    metadata_author: str | None = None
    """Author, in the same way."""
    metadata_description: str | None = None
    """Description, in the same way."""
    metadata_license: str | None = None
    """License, in the same way."""
    metadata_tags: str | None = None
    """Tags, between commas."""
    metadata_usage_hint: str | None = None
    """Short hint for those who use the file."""
    metadata_thumbnail: str | None = None
    """Small picture: an image file, which is copied into the metadata, or a data URL."""
    metadata_merged_from: str | None = None
    """Names of what the file was merged from."""
    metadata_trigger_phrase: str | None = None
    """Words that call up what was learned."""
    metadata_preprocessor: str | None = None
    """What must be done to inputs before."""
    metadata_is_negative_embedding: str | None = None
    """Say true of what belongs into negative prompts."""


@Parameter(name="*", group=groups.UPLOAD)
@dataclass(frozen=True, kw_only=True)
class UploadOptions:
    huggingface_repo_id: str | None = None
    """Repository (NAME/REPO) that every saved file is uploaded to; without it nothing is."""
    huggingface_repo_type: Literal["model", "dataset", "space"] = "model"
    """Kind of the repository."""
    huggingface_path_in_repo: str | None = None
    """Folder in the repository; without it files are at its top."""
    huggingface_token: str | None = None
    """Token with the right to write; without it the one of `hf auth login`, or HF_TOKEN. It is written nowhere."""
    huggingface_repo_visibility: Literal["private", "public"] = "private"
    """Who can see the repository, if it is made anew."""
    async_upload: bool = False
    """Train on at once while a file is on its way; without it training waits for it, a minute at most."""
