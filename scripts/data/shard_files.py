"""The files of one shard, written together or not at all, by one process at a time."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scripts.common.files import locked, sync


@dataclass(frozen=True)
class ShardFiles:
    """The paths of a shard: `prefix`, a suffix each, and `ending` while they are written."""

    prefix: Path
    ending: str = ""

    def _with(self, suffix: str) -> Path:
        return self.prefix.with_name(self.prefix.name + suffix + self.ending)

    @property
    def bin(self) -> Path:
        """Token ids."""
        return self._with(".bin")

    @property
    def idx(self) -> Path:
        """Megatron's index; it appears last, so where it exists the shard is complete."""
        return self._with(".idx")

    @property
    def sidecar(self) -> Path:
        """What the shard holds and was made from."""
        return self._with(".json")

    @property
    def ranks(self) -> Path:
        """The documents' ranks (float64), where the Parquet file has them."""
        return self._with(".rank.npy")

    @property
    def lock(self) -> Path:
        """Held by the process that writes the shard."""
        return self._with(".lock")

    def all(self) -> tuple[Path, ...]:
        """Returns all files of the shard, the index last."""
        return self.bin, self.ranks, self.sidecar, self.idx

    def partial(self) -> "ShardFiles":
        """Returns the files that are written to before they get their final names."""
        return ShardFiles(self.prefix, ".partial")


@contextmanager
def writing(shard: ShardFiles) -> Iterator[ShardFiles]:
    """Yields the partial files to write to, and gives them their final names after the block.

    Partial files of a killed process are overwritten or removed. All data is on the disk before
    the first file is renamed, and an old index goes before the new `.bin` comes.
    """
    shard.prefix.parent.mkdir(parents=True, exist_ok=True)
    partial = shard.partial()
    with locked(shard.lock, f"another process is writing {shard.prefix}.*; wait for it"):
        try:
            _remove(partial)
            yield partial
            written = [path.exists() for path in partial.all()]
            for path, exists in zip(partial.all(), written, strict=True):
                if exists:
                    sync(path)
            shard.idx.unlink(missing_ok=True)
            for path, final, exists in zip(partial.all(), shard.all(), written, strict=True):
                if exists:
                    path.replace(final)
                else:
                    final.unlink(missing_ok=True)
            sync(shard.prefix.parent)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise OSError(
                error.errno,
                f"{error.strerror}; nothing was left behind, make room and run again",
                str(shard.bin),
            ) from error
        finally:
            _remove(partial)
            shard.lock.unlink(missing_ok=True)


def _remove(files: ShardFiles) -> None:
    for path in files.all():
        path.unlink(missing_ok=True)
