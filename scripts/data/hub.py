"""Files of a Hugging Face repository: listed at a commit, fetched whole, checked by content.

A thin layer over huggingface_hub, which brings mirrors (`HF_ENDPOINT`), tokens (`HF_TOKEN`), Xet
and back-off. Added here: a download survives the death of its process and goes on where it stopped;
what arrives is compared with the hub's digest before it gets its name; errors are sentences.
Files that huggingface_hub fetches by Xet start anew instead (`HF_HUB_DISABLE_XET=1` avoids Xet).
"""

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import httpx2
from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get, is_xet_available, xet_get
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers

from scripts.common.files import locked, sha256, sync

RETRIES = 5
TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}
SPARE_BYTES = 1 << 30  # left free on the disk beside what is downloaded


class HubError(Exception):
    """A sentence for the user: what the hub refused and what to do."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository; `digest`: its SHA-256, or git's object id (SHA-1) of a small file."""

    path: str
    bytes: int
    digest: str

    def matches(self, path: Path) -> bool:
        """Says whether a local file has this content."""
        if path.stat().st_size != self.bytes:
            return False
        return self.digest == (sha256(path) if len(self.digest) == 64 else git_object_id(path))


def git_object_id(path: Path) -> str:
    """Returns the SHA-1 under which git stores a file's content."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class Repository:
    """A repository at a revision; `kind` is "dataset" or "model"."""

    name: str
    kind: str
    revision: str

    def commit(self) -> str:
        """Returns the commit that the revision means now."""
        api = HfApi()
        with self._explaining():
            info = persistent(
                lambda: api.repo_info(self.name, repo_type=self.kind, revision=self.revision)
            )
        return info.sha

    def files(self, folder: str | None = None) -> dict[str, RemoteFile]:
        """Lists the files of one folder (None: the topmost), not of those below it, by name."""
        api = HfApi()
        with self._explaining(folder or ""):
            entries = persistent(
                lambda: list(
                    api.list_repo_tree(
                        self.name, folder, revision=self.revision, repo_type=self.kind
                    )
                )
            )
        found = (entry for entry in entries if isinstance(entry, RepoFile))
        return {
            Path(file.path).name: RemoteFile(
                file.path, file.size, file.lfs.sha256 if file.lfs else file.blob_id
            )
            for file in found
        }

    def download(self, file: RemoteFile, target: Path) -> None:
        """Fetches a file to `target`, which appears only when its content has been checked.

        A file that is there already and has the right content is kept. Bytes that an earlier
        attempt fetched lie beside `target` in a `.partial` file and are used. Raises HubError, and
        BlockingIOError while another process downloads the file.
        """
        if target.exists() and file.matches(target):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        fetched = target.with_name(f"{target.name}.{file.digest[:8]}.partial")
        with locked(fetched, f"{target} is being downloaded by another process") as partial:
            resumed = size(partial) > 0
            intact = self._fetch(file, partial)
            if resumed and not intact:  # what the earlier attempt left was torn
                partial.truncate(0)
                intact = self._fetch(file, partial)
            if not intact:
                fetched.unlink()
                raise HubError(
                    f"{self._where(file.path)}: what arrived is not the content that the hub lists "
                    f"({file.bytes} bytes, digest {file.digest}); it was deleted. Run again; if it "
                    "happens again, a mirror or proxy alters files (HF_ENDPOINT)"
                )
            sync(fetched)
            fetched.replace(target)
            sync(target.parent)

    def _fetch(self, file: RemoteFile, partial: BinaryIO) -> bool:
        """Brings the partial file to its full size; says whether the content is right."""
        if size(partial) > file.bytes:
            partial.truncate(0)
        path = Path(partial.name)
        require_space(path.parent, file.bytes - size(partial))
        url = hf_hub_url(self.name, file.path, repo_type=self.kind, revision=self.revision)
        with self._explaining(file.path):
            persistent(lambda: self._transfer(url, file, partial))
        return file.matches(path)

    def _transfer(self, url: str, file: RemoteFile, partial: BinaryIO) -> None:
        """Makes one attempt; what has arrived when it fails stays in the partial file."""
        metadata = get_hf_file_metadata(url)
        if metadata.etag not in (None, file.digest):
            raise HubError(
                f"{self._where(file.path)} has changed: its digest is {metadata.etag} and not "
                f"{file.digest}; list the files again with scripts/data/source_manifest.py"
            )
        options = {"headers": build_hf_headers(), "expected_size": file.bytes}
        if metadata.xet_file_data and is_xet_available():
            path = Path(partial.name)
            xet_get(incomplete_path=path, xet_file_data=metadata.xet_file_data, **options)
        else:
            http_get(url, partial, resume_size=size(partial), **options)
            partial.flush()

    def _where(self, path: str = "") -> str:
        return f"{self.name}@{self.revision[:12]}{f'/{path}' if path else ''}"

    @contextmanager
    def _explaining(self, path: str = "") -> Iterator[None]:
        """Turns the hub's errors into sentences that say what to do."""
        try:
            yield
        except GatedRepoError as error:
            raise HubError(
                f"{self.name} asks for consent: accept its terms on its page and set HF_TOKEN"
            ) from error
        except RevisionNotFoundError as error:
            raise HubError(
                f"{self.name} has no revision {self.revision!r}: it was renamed or removed; set "
                "one that exists (a branch, a tag, refs/pr/N or a commit)"
            ) from error
        except RepositoryNotFoundError as error:
            raise HubError(
                f"no {self.kind} repository {self.name}: check its name, or set HF_TOKEN if it is "
                "private"
            ) from error
        except EntryNotFoundError as error:
            raise HubError(f"{self._where(path)} does not exist: check the path") from error
        except HfHubHTTPError as error:
            raise HubError(
                f"{self._where(path)}: the hub answers {error.response.status_code}; try later, or "
                "name a mirror in HF_ENDPOINT"
            ) from error
        except (httpx2.HTTPError, ConnectionError) as error:
            raise HubError(
                f"{self._where(path)}: no connection to the hub ({error}); run again, the download "
                "goes on where it stopped. A mirror can be named in HF_ENDPOINT"
            ) from error


def persistent[Result](call: Callable[[], Result]) -> Result:
    """Calls again, with growing pauses, as long as the fault is one that passes."""
    for attempt in range(RETRIES):
        try:
            return call()
        except HfHubHTTPError as error:
            if error.response.status_code not in TRANSIENT_STATUS:
                raise
        except httpx2.TransportError:
            pass
        time.sleep(2**attempt)
    return call()


def size(file: BinaryIO) -> int:
    """Returns the size in bytes of a file that is open for appending."""
    return file.seek(0, 2)


def require_space(folder: Path, needed: int) -> None:
    """Raises HubError unless the disk has room for `needed` bytes and a little more."""
    free = shutil.disk_usage(folder).free
    if free < needed + SPARE_BYTES:
        raise HubError(
            f"{folder} has {free / 1e9:.1f} GB free and {needed / 1e9:.1f} GB are to be downloaded "
            f"(and {SPARE_BYTES / 1e9:.1f} GB stay free): free some space, or set "
            "`keep_parquet: false` to drop each file once it is converted"
        )
