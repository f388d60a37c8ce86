"""Building the book with Sphinx, into a folder that holds nothing else."""

from __future__ import annotations

import io
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

from lab.errors import LabError
from lab.jupyter.book.settings import PROJECT

NEEDED = ("sphinx", "myst_nb", "furo")


def build(out: Path) -> list[str]:
    """Build the book into the folder ``out``, and return Sphinx's warnings, a line each.

    No notebook is executed, and nothing is downloaded. The folder is made where it does not exist. An older
    book in it is replaced after the new one has been built.

    Raises:
        LabError: A package is not installed, or ``out`` is not a folder in which a book can be written.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise LabError(f"the book needs {', '.join(missing)}: install with pip install -e '.[book]'")
    _check_folder(out)

    from sphinx.application import Sphinx
    from sphinx.util.docutils import docutils_namespace, patch_docutils

    from lab.jupyter.book.sources import write_sources

    with TemporaryDirectory(prefix="lab-book-") as folder:
        sources, pages, warnings = Path(folder, "sources"), Path(folder, "pages"), io.StringIO()
        write_sources(sources)
        # What Sphinx and its extensions register in docutils is only registered until the book is built.
        with patch_docutils(sources), docutils_namespace():
            app = Sphinx(
                srcdir=sources,
                confdir=sources,
                outdir=pages,
                doctreedir=Path(folder, "doctrees"),
                buildername="html",
                status=None,
                warning=warnings,
            )
            app.build()
        _empty(out)
        shutil.copytree(pages, out, dirs_exist_ok=True)
        # Sphinx's files have their paths in the temporary folder, and warnings the colours of a terminal.
        plain = re.sub(r"\x1b\[[0-9;]*m", "", warnings.getvalue()).replace(f"{sources}/", "")
    return plain.splitlines()


def _check_folder(out: Path) -> None:
    """Check that ``out`` can be written, and is empty or has a book.

    Raises:
        LabError: It is not so.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out):
            other = any(out.iterdir()) and not _has_book(out)
    except (FileExistsError, NotADirectoryError):
        raise LabError(f"--out {out}: a file is in the way; give a folder for the book") from None
    except OSError as error:
        raise LabError(f"--out {out}: {error.strerror}; give a folder that you can write to") from None
    if other:
        raise LabError(
            f"--out {out}: the folder has other files, which a book would replace; give an empty one"
        )


def _has_book(out: Path) -> bool:
    """Return whether the folder has a book of the lab: the inventory of its pages has the book's title."""
    inventory = out / "objects.inv"
    return inventory.is_file() and f"# Project: {PROJECT}\n".encode() in inventory.read_bytes()


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
