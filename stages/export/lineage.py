"""lineage.json, in the directory of a consolidated model: everything that made its weights, and their digests.

It has no clock times, and no path of this machine but a `model_name` that is one, so that the same training gives the
same file everywhere.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from stages.base import publish
from stages.base.errors import StageError
from stages.base.files import FileName, RelativePath, SealedJsonFile
from stages.base.identity import Adoption, RunId, TokenFingerprints
from stages.base.origin import Origin
from stages.model.files import CARD, LINEAGE
from stages.model.manifest import MODEL_MANIFEST

DataStage = Annotated[str, Field(pattern="^(organize|extract|deduplicate|pack)$")]


@dataclass(frozen=True)
class InitialModel:
    """The model that the run started from."""

    name: Annotated[str, Field(min_length=1)]
    """A Hub id or a local directory, as given in params.yaml."""
    revision: str
    """As given in params.yaml."""
    commit: str | None
    """The commit that the revision stood for; null for a local directory."""
    manifest: str
    """SHA-256 of data/model.json."""
    lineage: "Lineage | None"
    """That model's own lineage, where an earlier training of this pipeline made it."""


@dataclass(frozen=True)
class Lineage(SealedJsonFile):
    """Content of lineage.json."""

    STAGE: ClassVar[str] = "consolidate"

    run_id: RunId
    step: int
    """Optimizer steps done."""
    adopted: Adoption | None
    """The checkpoint of another run that the run continued from, as run.json describes it."""
    model: InitialModel
    data: TokenFingerprints
    """Fingerprints of the packed tokens: `train`, `validation`."""
    params: dict[str, Any]
    """Those of the training."""
    code: str
    """Digest of the modules that the train stage reaches."""
    packages: dict[str, str]
    """Versions of what computed the weights."""
    checkpoint: str
    """Digest of the checkpoint that the weights are from: `result_sha256` in run.json."""
    weights: dict[FileName, str]
    """SHA-256 of each weight file."""
    history: str | None = None
    """SHA-256 of history.tsv up to this step."""
    tensors: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the bytes of each tensor in these files."""
    encoder: str | None = None
    """The tokenizer library that encoded the data, as in data/pack.json; null: no such file of these tokens."""
    files: dict[RelativePath, str] = field(default_factory=dict)
    """SHA-256 of the other files: config, tokenizer."""
    card: str | None = None
    """SHA-256 of README.md as it was written: people edit it, and programs do not load it."""
    splits: str | None = None
    """SHA-256 of data/splits/summary.json, which has those of the manifests, which have those of all raw files."""
    corpus: str | None = None
    """Fingerprint of data/corpus."""
    origins: dict[DataStage, Origin] = field(default_factory=dict)
    """Parameters and packages of the data stages, as far as the project has records of these data."""

    def write_with_card(self, directory: Path, card: str) -> None:
        """Write lineage.json and README.md."""
        publish.write_text(directory / CARD, card)
        replace(self, card=publish.sha256_file(directory / CARD)).write(directory / LINEAGE)

    def check_initial_model(self, stage: str) -> None:
        """Check that data/model.json describes the model that the run started from.

        What `stage` measures of another one would be taken for what the model was before its training.

        Raises:
            StageError: it does not.
        """
        if self.model.manifest != publish.sha256_file(MODEL_MANIFEST):
            raise StageError(
                f"{MODEL_MANIFEST} is not of the model that run {self.run_id} was trained from: run `dvc repro "
                f"{stage}`, which trains from this one"
            )
