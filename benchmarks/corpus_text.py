"""Gathers real text to build corpora from: English and Chinese, out of Debian packages.

python benchmarks/corpus_text.py --folder .cache/corpus-text

Packages are fetched by apt-get and unpacked by dpkg, into the folder alone: no root is needed and
nothing is installed. RFCs lie in the section non-free, so the script keeps a list of sources of its
own, made from the machine's. Writes english.jsonl and chinese.jsonl, a line {"id", "text"} a
document, in an order that mixes the sources (by the digest of the id), and sources.json with each
package's version, documents and bytes. The texts have many licences (GFDL, GPL, RFC Trust ...):
for measuring, not for a repository.
"""

import argparse
import collections
import functools
import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import corpus_text_readers as readers

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("mandoc", "bible-kjv")
ENGLISH = """
    doc-rfc-std doc-rfc-old-std doc-rfc-fyi-bcp bible-kjv-text python3.11-doc manpages manpages-dev
    manpages-posix manpages-posix-dev freebsd-manpages tcl8.6-doc tk8.6-doc libcurl4-doc libssl-doc
    git-man git-doc perl-doc erlang-manpages dict-gcide dict-foldoc linux-doc-6.1 postgresql-doc-15
    fortunes developers-reference
""".split()
# those whose name says Chinese, and those that are known to have Chinese pages among others
CHINESE = """
    manpages-zh fortunes-zh libreoffice-help-zh-cn libreoffice-help-zh-tw debian-reference-zh-cn
    debian-reference-zh-tw debian-edu-doc-zh-cn debian-edu-doc-legacy-zh-cn debian-faq-zh-cn
    gimp-help-zh-cn kicad-doc-zh lilypond-doc-html-zh linuxcnc-doc-zh-cn maint-guide-zh-cn
    maint-guide-zh-tw linux-doc-6.1 debian-handbook installation-guide-amd64 gnome-user-docs
    gedit-common evince-common evolution-common inkscape-tutorials vim-runtime passwd login man-db
    aisleriot accerciser baobab eog brasero-common cheese-common totem-common file-roller ghex glade
    gnome-calculator gnome-klotski gnome-tetravex simple-scan swell-foop tali
""".split()
_IS_CHINESE_PATH = re.compile(r"(^|[/._-])zh([/._-]|$)", re.IGNORECASE)
_HAN = re.compile("[一-鿿]")
_KANA = re.compile("[぀-ヿ]")


class Packages:
    """Fetches packages into a folder and unpacks them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("lists/partial", "cache/archives/partial", "debs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        sources = folder / "sources.list"
        self._apt = ["apt-get", "-qq", "-o", f"Dir::Etc::SourceList={sources}"]
        self._apt += ["-o", "Dir::Etc::SourceParts=/dev/null", "-o", "APT::Sandbox::User=root"]
        self._apt += ["-o", f"Dir::State::Lists={folder / 'lists'}"]
        self._apt += ["-o", f"Dir::Cache={folder / 'cache'}"]
        if not sources.exists():
            sources.write_text(self._own_sources())
            subprocess.run([*self._apt, "update"], check=True)

    @staticmethod
    def _own_sources() -> str:
        """The machine's Debian archive, with its section non-free."""
        asked = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME) $(COMPONENT)"]
        found = subprocess.run(
            [*asked, "Created-By: Packages", "Origin: Debian"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        targets = sorted({line for line in found.splitlines() if line.endswith(" main")})
        plain = [line for line in targets if not re.search("security|updates|backports", line)]
        keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
        return "".join(f"deb [signed-by={keys}] {line} non-free\n" for line in plain)

    def fetch(self, name: str) -> Path:
        """The .deb file of a package."""
        folder = self.folder / "debs"
        if not (found := sorted(folder.glob(f"{name}_*.deb"))):
            subprocess.run([*self._apt, "download", name], cwd=folder, check=True)
            found = sorted(folder.glob(f"{name}_*.deb"))
        return found[0]

    def unpack(self, name: str, folder: Path) -> Path:
        """The folder with a package's files."""
        (folder / name).mkdir(parents=True)
        subprocess.run(["dpkg", "-x", str(self.fetch(name)), str(folder / name)], check=True)
        return folder / name


def reader_of(path: Path, programs: Path) -> Callable[[Path], readers.Texts] | None:
    """What reads this file, if it holds prose."""
    name, place = path.name.removesuffix(".gz"), str(path)
    if path.is_symlink() or re.search("changelog|copyright|/lintian/|NEWS", place):
        return None
    if re.search(r"/man/([\w.@]+/)?man\w+/", place):
        return functools.partial(readers.manual, mandoc=programs / "mandoc/usr/bin/mandoc")
    if re.search(r"\.(dict\.dz)$", name):
        return readers.dictionary
    if "/games/fortunes/" in place and not path.suffix:
        return readers.sayings
    if name == "bible.data":
        return functools.partial(readers.bible, programs / "bible-kjv/usr/bin/bible")
    has_sources = re.search(r"/(python3|linux-doc|doc-rfc|git-doc)", place)
    if re.search(r"\.html?$", name) and not has_sources:
        return readers.web_page
    if re.search(r"\.(page|docbook)$", name) or (path.suffix == ".svg" and "tutorial" in place):
        return readers.xml_page
    if re.search(r"\.(txt|rst|pod)$", name) or re.search(r"tutor\.zh.*utf-8$", name):
        is_chinese = bool(_IS_CHINESE_PATH.search(place))
        return functools.partial(readers.plain, is_chinese=is_chinese)
    return None


def texts_of(folder: Path, programs: Path, *, chinese: bool) -> Iterator[tuple[str, str]]:
    """The texts of an unpacked package in one of the languages."""
    for path in sorted(folder.rglob("*")):
        place = f"{folder.name}/{path.relative_to(folder)}"
        if not path.is_file() or (chinese != bool(_IS_CHINESE_PATH.search(place))):
            continue
        if not chinese and re.search(r"/translations/|/man/\w\w(_\w\w)?/", place):
            continue
        if (reader := reader_of(path, programs)) is None:
            continue
        for name, text in reader(path):
            if text.strip() and (not chinese or _is_chinese(text)):
                yield place + name, text


def _is_chinese(text: str) -> bool:
    """At least one character in twenty is Han, and there is next to no kana."""
    num_han = len(_HAN.findall(text))
    return num_han * 20 >= len(text) and len(_KANA.findall(text)) * 20 <= num_han


def gather(packages: Packages, names: list[str], file: Path, *, chinese: bool) -> dict:
    """Writes the documents of the packages, each once; what came from which."""
    documents: dict[bytes, tuple[str, str]] = {}
    sources: dict[str, dict] = {}
    with tempfile.TemporaryDirectory(dir=packages.folder) as unpacked:
        programs = Path(unpacked) / "programs"
        for name in PROGRAMS:
            packages.unpack(name, programs)
        for name in names:
            sums = collections.Counter()
            folder = packages.unpack(name, Path(unpacked))
            for place, text in texts_of(folder, programs, chinese=chinese):
                digest = hashlib.sha256(text.encode()).digest()
                if digest not in documents:
                    documents[digest] = (place, text)
                    sums += {"documents": 1, "bytes": len(text.encode())}
            version = packages.fetch(name).name.split("_")[1]
            sources[name] = {"version": version, **sums}
            print(f"{name:30} {sums['documents']:7} documents {sums['bytes'] / 1e6:7.1f} MB")
    write(documents.values(), file)
    return sources


def write(documents: Iterator[tuple[str, str]], file: Path) -> None:
    """The documents as JSON lines, mixed by the digest of their names."""
    mixed = sorted(documents, key=lambda pair: hashlib.sha256(pair[0].encode()).digest())
    with file.with_suffix(".part").open("w", encoding="utf-8") as out:
        for place, text in mixed:
            out.write(json.dumps({"id": place, "text": text}, ensure_ascii=False) + "\n")
    file.with_suffix(".part").rename(file)
    total = sum(len(text.encode()) for _, text in mixed)
    print(f"{file}: {len(mixed)} documents, {total / 1e6:.1f} MB of text")


def main() -> None:
    """Gathers both languages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache/corpus-text")
    folder = parser.parse_args().folder.resolve()
    packages = Packages(folder)
    sources = {
        "chinese": gather(packages, CHINESE, folder / "chinese.jsonl", chinese=True),
        "english": gather(packages, ENGLISH, folder / "english.jsonl", chinese=False),
    }
    (folder / "sources.json").write_text(json.dumps(sources, indent=1) + "\n")


if __name__ == "__main__":
    main()
