"""The license of the initial model, `data/license.json`, which the models that are made from it carry on.

It is not in data/model.json, because it decides no weight: after a license was added or corrected, nothing is trained
again, and only `consolidate` and the stages after it run.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import yaml

from stages.base.files import FileEntry, FileName, SealedJsonFile
from stages.model.files import CARD

LICENSE = Path("data/license.json")

_TEXTS = re.compile(r"(licen[cs]e|notice|use_policy)([._-].*)?", re.IGNORECASE)
_KEYS = ("license", "license_name", "license_link", "language", "base_model")
_FRONT_MATTER = re.compile(rb"(?:\xef\xbb\xbf)?\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|\Z)", re.DOTALL)
_LARGEST = 1 << 16
"""Bytes in which the metadata must end."""


@dataclass(frozen=True)
class ModelLicense(SealedJsonFile):
    """What the initial model says about its license."""

    STAGE: ClassVar[str] = "download"
    PATH: ClassVar[Path] = LICENSE

    metadata: dict[str, str | list[str]]
    """Of its model card, as the Hub defines it: license, license_name, license_link, language, base_model."""
    problem: str | None
    """Why the license is unknown; null: it is in `metadata`."""
    files: dict[FileName, FileEntry]
    """The model card and the texts: LICENSE, NOTICE, USE_POLICY ..."""

    @classmethod
    def of(cls, directory: Path, files: dict[str, FileEntry]) -> "ModelLicense":
        """What a model says about its license.

        A card that is missing or damaged is no error: the license is unknown then, which `problem` explains.

        Args:
            directory: Of the model.
            files: Those that `is_license_file` names.
        """
        if CARD not in files:
            return cls({}, f"there is no {CARD} beside its config", files)
        with (directory / CARD).open("rb") as file:
            front_matter = _FRONT_MATTER.match(file.read(_LARGEST))
        if not front_matter:
            return cls({}, f"its {CARD} has no metadata in the first {_LARGEST >> 10} KiB", files)
        try:
            # Nodes, not values: aliases are not expanded, tags and merges not followed.
            root = yaml.compose(front_matter[1].decode(), Loader=yaml.SafeLoader)
        except (yaml.YAMLError, ValueError, OverflowError, RecursionError):  # also: not UTF-8, no character, too deep
            return cls({}, f"the metadata of its {CARD} is not valid YAML", files)
        pairs = root.value if isinstance(root, yaml.MappingNode) else []
        named = {key.value: value for key, value in pairs if isinstance(key, yaml.ScalarNode)}
        metadata = {key: value for key in _KEYS if key in named and (value := _plain(named[key], key == "language"))}
        is_known = metadata.get("license", "unknown") != "unknown"
        return cls(metadata, None if is_known else f"its {CARD} does not name it", files)

    def texts(self) -> list[str]:
        """The names of the files that are copied beside the weights; each model has a card of its own."""
        return [name for name in self.files if name != CARD]


def is_license_file(name: str) -> bool:
    """Whether a file of a model has its license, or names it."""
    return name == CARD or _TEXTS.fullmatch(name) is not None


def _plain(node: yaml.Node, is_language: bool) -> str | list[str] | None:
    """A line of text, or a list of such; None: something else."""
    if isinstance(node, yaml.SequenceNode):
        return [text for item in node.value if (text := _line(item, is_language))]
    return _line(node, is_language)


def _line(node: yaml.Node, is_language: bool) -> str | None:
    # Norwegian is `no`, to YAML a boolean.
    tags = ("tag:yaml.org,2002:str", *(["tag:yaml.org,2002:bool"] if is_language else []))
    is_text = isinstance(node, yaml.ScalarNode) and node.tag in tags
    return node.value if is_text and node.value.isprintable() and "`" not in node.value else None
