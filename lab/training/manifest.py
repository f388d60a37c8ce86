"""What a checkpoint says of itself, which checkpoints of a folder are whole, and whose run they belong to.

``DIR/step-00000012/`` is whole: it was renamed to that name after the last byte was written. What ends in
``.part`` never was, or is being deleted; it is only ever removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from lab.errors import CheckpointError

FILE = "manifest.json"
PART = ".part"
_STEP = re.compile(r"step-(\d{8,})")

VOLATILE = {"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"}
"""What two configs of one model may differ in."""


@dataclass(frozen=True)
class Manifest:
    """What must be the same for a run to go on (down to ``clip_norm``), and what is only noted.

    ``text`` is the digest of the encoded text; ``step`` the steps done; ``files`` the bytes of each file.
    """

    config: dict[str, Any]
    text: str
    tokens: int
    rows: int
    seed: int
    learning_rate: float
    clip_norm: float
    recipe: dict[str, Any]
    ranks: int
    step: int = 0
    files: dict[str, int] | None = None

    def complete(self, folder: Path) -> None:
        """Note the files of ``folder``, and lie down among them."""
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        with (folder / FILE).open("w", encoding="utf-8") as file:
            json.dump(asdict(replace(self, files=sizes)), file, indent=1)
            file.flush()
            os.fsync(file.fileno())

    def check_continues(self, earlier: Manifest, folder: Path) -> None:
        """Refuse to go on from ``earlier``, the manifest in ``folder``, as another model or another run.

        Raises:
            CheckpointError: with what differs, there and here. The ranks and the recipe may differ.
        """
        there, here = earlier.config, self.config
        # A name that one of them lacks came or went with a version of transformers.
        differing = {k: (there[k], here[k]) for k in there if k in here and there[k] != here[k]}
        if differing:
            raise CheckpointError(
                f"{folder} holds another model: {_differences(differing)}; give that model, or another folder"
            )
        names = [field.name for field in fields(self)]
        same = names[names.index("text") : names.index("clip_norm") + 1]
        pairs = {name: (getattr(earlier, name), getattr(self, name)) for name in same}
        differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        if differing:
            raise CheckpointError(
                f"{folder} is of another run: {_differences(differing)}; losses would not go on as one "
                "sequence: give what it was trained with, or another folder"
            )


def config_document(config: PretrainedConfig) -> dict[str, Any]:
    """A config as JSON would give it back, without what two configs of one model may differ in."""
    document: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {name: value for name, value in document.items() if name not in VOLATILE}


def digest(tokens: Tensor) -> str:
    """What tells one encoded text, int64 [n], from another."""
    return hashlib.sha256(tokens.contiguous().numpy().data).hexdigest()[:16]


def name_of(step: int) -> str:
    """The folder of the checkpoint after ``step`` steps."""
    return f"step-{step:08}"


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first; none where there is no such folder."""
    if not folder.is_dir():
        return []
    by_step = {int(m[1]): path for path in folder.iterdir() if (m := _STEP.fullmatch(path.name))}
    return [by_step[step] for step in sorted(by_step)]


def read(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint whose every file is as long as it was written.

    Raises:
        CheckpointError: a file is missing or cut short; it is named, and an earlier checkpoint that is whole.
    """
    manifest, damage = _read(checkpoint)
    if manifest is None:
        whole = [path for path in checkpoints_in(checkpoint.parent) if _read(path)[0] is not None]
        helps = (
            f"{whole[-1].name} beside it is whole: remove {checkpoint.name} to go on from there"
            if whole
            else "no other in its folder is whole"
        )
        raise CheckpointError(f"{checkpoint} is cut short: {damage}; {helps}")
    return manifest


def newest(folder: Path) -> tuple[Path, Manifest]:
    """The newest checkpoint in a folder, and its manifest.

    Raises:
        CheckpointError: there is none, or it is cut short.
    """
    checkpoints = checkpoints_in(folder)
    if not checkpoints:
        raise CheckpointError(
            f"no checkpoint in {folder}: give a folder that has one; a first start goes without --resume"
        )
    return checkpoints[-1], read(checkpoints[-1])


def sweep(folder: Path) -> None:
    """Remove what was never whole, as a process that was killed leaves it."""
    for path in folder.glob(f"*{PART}"):
        if path.is_dir():
            shutil.rmtree(path)


def remove_all_but(keep: int, folder: Path) -> None:
    """Remove all but the newest ``keep`` checkpoints."""
    for path in checkpoints_in(folder)[:-keep]:
        # Renamed first: killed half way, it leaves no checkpoint that is cut short.
        leaving = path.rename(path.with_name(path.name + PART))
        shutil.rmtree(leaving, ignore_errors=True)


def _read(checkpoint: Path) -> tuple[Manifest | None, str]:
    """The manifest of a whole checkpoint, else what is wrong with it."""
    try:
        manifest = Manifest(**json.loads((checkpoint / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None, f"its {FILE} is missing or unreadable"
    for name, size in (manifest.files or {}).items():
        path = checkpoint / name
        actual = path.stat().st_size if path.exists() else 0
        if actual != size:
            return None, f"{name} has {actual} of its {size} bytes"
    return manifest, ""


def _differences(differing: dict[str, tuple[Any, ...]]) -> str:
    return ", ".join(f"{name} {there} there and {here} here" for name, (there, here) in differing.items())
