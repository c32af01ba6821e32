"""Checkpoints that travel to another clone of the project, by way of the DVC remote or a directory.

The layout there is the one here, `<experiment_name>/<run_id>/step-N`, so a directory that all clones can read may
also serve as their $CHECKPOINT_ROOT. Files are written one by one, the manifest last: a checkpoint exists when its
manifest does. A transfer that was interrupted continues; files that arrived intact are not sent again.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.artifacts import publish
from stages.artifacts.errors import StageError
from stages.artifacts.record import DamagedFile, FileEntry, damaged
from stages.checkpointing import retention
from stages.checkpointing.layout import MANIFEST, CheckpointManifest, verify

if TYPE_CHECKING:
    from dvc.fs import FileSystem


@dataclass(frozen=True)
class Store:
    """A place that other clones can read, with a checkpoint root in it."""

    fs: "FileSystem"
    """Of DVC, which knows the protocols and credentials of its remotes."""
    root: str

    @classmethod
    def open(cls, directory: Path | None) -> "Store":
        """A directory, or where that is None, the default remote of DVC.

        Raises:
            StageError: DVC has no default remote, or no package for it.
        """
        # Here, not above: it takes a second, which `list` and `verify` need not.
        from dvc.exceptions import DvcException
        from dvc.fs import LocalFileSystem
        from dvc.repo import Repo

        if directory is not None:
            return cls(LocalFileSystem(), str(directory.absolute()))
        try:
            remote = Repo().cloud.get_remote()
            fs = remote.fs  # which may need a package of its own, such as dvc-s3
        except (DvcException, ImportError) as error:
            raise StageError(f"{error}\nor name a directory: `push --to DIR`, `pull --from DIR`") from None
        return cls(fs, fs.join(remote.path, "checkpoints"))

    def path(self, *parts: str) -> str:
        """A path in the store, as its file system writes it."""
        return str(self.fs.join(self.root, *parts))

    def list_checkpoints(self, experiment_name: str, run_id: str) -> list[str]:
        """The names of the checkpoints of a run, newest first."""
        run = self.path(experiment_name, run_id)
        names = [self.fs.name(path) for path in self.fs.ls(run, detail=False)] if self.fs.exists(run) else []
        return sorted((name for name in names if self.fs.exists(self.fs.join(run, name, MANIFEST))), reverse=True)

    def push(self, checkpoint: Path, experiment_name: str) -> None:
        """Copy a checkpoint into the store; both sides are verified.

        Raises:
            StageError: it is damaged here, or a file arrived damaged.
        """
        entries = verify(checkpoint).files | {MANIFEST: FileEntry.of(checkpoint / MANIFEST)}
        target = self.path(experiment_name, checkpoint.parent.name, checkpoint.name)
        for directory in {self.fs.parent(self.fs.join(target, name)) for name in entries}:
            self.fs.makedirs(directory)
        # The manifest of another checkpoint by this name, as of a run that was started over, describes other files.
        manifest = self.fs.join(target, MANIFEST)
        if self.fs.exists(manifest) and not self._has(manifest, entries[MANIFEST]):
            self.fs.remove(manifest)
        for name, entry in entries.items():
            path = self.fs.join(target, name)
            if not self._has(path, entry):
                self.fs.put_file(str(checkpoint / name), path)
                if not self._has(path, entry):
                    raise damaged(path, "it is not what was sent", "check the store, and that no other push runs")

    def pull(self, experiment_name: str, checkpoint: Path) -> None:
        """Copy a checkpoint from the store to `checkpoint`, where it appears when all files are verified.

        Raises:
            StageError: a file is missing in the store, or damaged.
        """
        source = self.path(experiment_name, checkpoint.parent.name, checkpoint.name)
        temporary = checkpoint.with_name(checkpoint.name + retention.TEMPORARY)
        temporary.mkdir(parents=True, exist_ok=True)
        self.fs.get_file(self.fs.join(source, MANIFEST), str(temporary / MANIFEST))
        files = CheckpointManifest.read(temporary).files
        for name, entry in files.items():
            (temporary / name).parent.mkdir(exist_ok=True)
            if not ((temporary / name).is_file() and FileEntry.of(temporary / name) == entry):
                if not self.fs.exists(self.fs.join(source, name)):
                    raise StageError(f"{self.fs.join(source, name)} is missing: push the checkpoint again")
                self.fs.get_file(self.fs.join(source, name), str(temporary / name))
        for path in temporary.rglob("*"):  # a save that was killed at this step may have left files of more ranks
            if path.is_file() and str(path.relative_to(temporary)) not in {*files, MANIFEST}:
                path.unlink()
        try:
            verify(temporary)
        except DamagedFile as error:
            raise StageError(f"{source} is damaged, or was not transferred completely: {error}") from None
        publish.sync_tree(temporary)
        publish.rename(temporary, checkpoint)

    def _has(self, path: str, entry: FileEntry) -> bool:
        """Whether the store has a file with this content, all of which is read back."""
        if not self.fs.exists(path) or self.fs.size(path) != entry.size:
            return False
        file: Any
        with self.fs.open(path, "rb") as file:
            return publish.sha256(file) == entry.sha256


def last_and_best(pointed: Path) -> list[Path]:
    """The checkpoint that run.json points to, and what else its run is kept for: its last one, and its best."""
    complete = retention.list_complete(pointed.parent)
    found = [pointed, *(path for path, _ in complete[:1]), retention.best(complete)]
    return list(dict.fromkeys(path for path in found if path is not None))
