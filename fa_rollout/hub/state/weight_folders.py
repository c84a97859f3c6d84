"""The folders of weight files: of the version that engines hold, and of the update that is open.

Invariant: no folder is removed from which an engine may still load, or into which a trainer may still write;
one of the trainer's own is never removed.
"""

import shutil
from pathlib import Path


class WeightFolders:
    """One folder a version, under the run's own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.published_path: str | None = None
        """Folder of the published version; None when engines started with it or it was pushed without."""
        self.is_streamed = False
        """The published version was sent to the engines by stages."""
        self._open: Path | None = None
        """Of the last update: an open one's, or one that failed while its leader may still have written."""

    def open(self, lineage: str, version: int) -> Path:
        """An empty folder for the next version."""
        self._remove_unused()
        folder = self._open = self._directory / f"{lineage}-{version}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def published(self, path: str | None, *, is_streamed: bool) -> None:
        """Every engine has a new version: what was kept of the old one goes."""
        old, self.published_path = self.published_path, path
        self.is_streamed = is_streamed
        if old != path and self._is_ours(old):
            shutil.rmtree(str(old), ignore_errors=True)
        self._remove_unused()

    def _is_ours(self, path: str | None) -> bool:
        return path is not None and Path(path).parent == self._directory

    def _remove_unused(self) -> None:
        if self._open is not None and str(self._open) != self.published_path:
            shutil.rmtree(self._open, ignore_errors=True)
        self._open = None
