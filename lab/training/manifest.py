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
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from lab.errors import CheckpointError
from lab.step.on_ranks import Training
from lab.units import MiB, abbreviate

FILE = "manifest.json"
HASH = "sha256"
"""The field of the file that has the hash of all others."""
PART = ".part"
_STEP = re.compile(r"step-([0-9]{8,18})")

VOLATILE = {"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"}
"""What two configs of one model may differ in."""

OF_SETTINGS = ("seed", "learning_rate", "warmup", "schedule", "weight_decay", "clip_norm", "steps")
"""The fields that a manifest has of ``TrainSettings``."""


@dataclass(frozen=True)
class Manifest:
    """What must be the same for a run to go on (down to ``clip_norm``), and what is only noted.

    ``text`` is the digest of the tokens of the text; ``rows_per_step`` counts those of all micro-batches;
    ``steps`` are those that were asked for, which must be the same with the schedule "cosine" alone, because
    its learning rates follow from them; ``step`` are the steps done; ``files`` has the bytes and the CRC-32
    of each file.
    """

    config: dict[str, Any]
    text: str
    tokens: int
    rows_per_step: int
    seed: int
    learning_rate: float
    warmup: int
    schedule: str
    weight_decay: float
    clip_norm: float
    steps: int
    recipe: dict[str, Any]
    ranks: int
    step: int = 0
    files: dict[str, list[int]] | None = None

    @classmethod
    def of(cls, training: Training) -> Manifest:
        """Return the manifest of a training before its first step."""
        job, settings = training.job, training.settings
        return cls(
            config=config_document(training.config),
            text=training.source.digest(),
            tokens=job.tokens,
            rows_per_step=job.step_rows,
            recipe=job.recipe.to_json(),
            ranks=job.ranks,
            **{name: getattr(settings, name) for name in OF_SETTINGS},
        )

    def complete(self, folder: Path) -> None:
        """Note the files of ``folder``, and write this manifest into it, with a hash of all that it says."""
        files = {path.name: [path.stat().st_size, _checksum(path)] for path in sorted(folder.iterdir())}
        document = asdict(replace(self, files=files))
        with (folder / FILE).open("w", encoding="utf-8") as file:
            json.dump(document | {HASH: _hash(document)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())

    def check_continues(self, earlier: Manifest, folder: Path) -> None:
        """Refuse to go on from ``earlier``, the manifest in ``folder``, as another model or another run.

        Raises:
            CheckpointError: with what differs, there and here. The ranks and the recipe may differ.
        """
        there, here = earlier.config, self.config
        # A name that is missing there came with a version of transformers, which gives it a default. A name
        # that is missing here went with one.
        usual = config_document(CONFIG_MAPPING[here["model_type"]]())
        pairs = {name: (there.get(name, usual.get(name)), value) for name, value in here.items()}
        differing = {name: pair for name, pair in pairs.items() if json.dumps(pair[0]) != json.dumps(pair[1])}
        if differing:
            raise CheckpointError(
                f"{folder} holds another model: {_differences(differing)}; give that model, or another folder"
            )
        names = [field.name for field in fields(self)]
        same = names[names.index("text") : names.index("clip_norm") + 1]
        if self.schedule == earlier.schedule == "cosine":
            same.append("steps")
        pairs = {name: (getattr(earlier, name), getattr(self, name)) for name in same}
        differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        if differing:
            raise CheckpointError(
                f"{folder} is of another run: {_differences(differing)}; losses would not go on as one "
                "sequence: give what it was trained with, or another folder"
            )


_KINDS: dict[str, type | tuple[type, ...]] = {
    "config": dict, "text": str, "tokens": int, "rows_per_step": int, "seed": int,
    "learning_rate": (int, float), "warmup": int, "schedule": str, "weight_decay": (int, float),
    "clip_norm": (int, float), "steps": int, "recipe": dict, "ranks": int, "step": int, "files": dict,
}  # fmt: skip
"""What each field of a manifest is, for one that was edited."""


def config_document(config: PretrainedConfig) -> dict[str, Any]:
    """A config as JSON would give it back, without what two configs of one model may differ in."""
    document: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {name: value for name, value in document.items() if name not in VOLATILE}


def name_of(step: int) -> str:
    """The folder of the checkpoint after ``step`` steps."""
    return f"step-{step:08}"


def in_checkpoint(path: Path, folder: Path) -> bool:
    """Return whether a path is that of a checkpoint in ``folder``, or is inside one."""
    path, folder = path.resolve(), folder.resolve()
    inside = path.relative_to(folder).parts if path.is_relative_to(folder) else ()
    return bool(inside and _STEP.fullmatch(inside[0]))


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first; none where there is no such folder."""
    if not folder.is_dir():
        return []
    found = ((_STEP.fullmatch(path.name), path) for path in folder.iterdir())
    by_step = {int(m[1]): path for m, path in found if m and name_of(int(m[1])) == path.name}
    return [by_step[step] for step in sorted(by_step)]


def read(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint whose every file is as it was written.

    All its files are read once, on one rank; CRC-32 takes about a second for every 3 GB.

    Raises:
        CheckpointError: a file is missing, cut short, changed, a link, or not in the manifest. The message
            names it, and an earlier checkpoint that is whole.
    """
    manifest, damage = _read(checkpoint)
    if manifest is None:
        whole = [path for path in checkpoints_in(checkpoint.parent) if _read(path)[0] is not None]
        helps = (
            f"{whole[-1].name} beside it is whole: remove {checkpoint.name} to go on from there"
            if whole
            else "no other in its folder is whole"
        )
        raise CheckpointError(f"{checkpoint} is damaged: {damage}; {helps}")
    return manifest


def newest(folder: Path) -> tuple[Path, Manifest]:
    """The newest checkpoint in a folder, and its manifest.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    checkpoints = checkpoints_in(folder)
    if not checkpoints:
        raise CheckpointError(
            f"no checkpoint in {folder}: give a folder that has one; a first start goes without --resume"
        )
    return checkpoints[-1], read(checkpoints[-1])


def sweep(folder: Path) -> None:
    """Remove what was never whole, as a process that was killed leaves it."""
    for path in folder.glob(f"step-*{PART}"):
        if _STEP.fullmatch(path.name.removesuffix(PART)):
            _remove(path)


def remove_all_but(keep: int, folder: Path) -> None:
    """Remove all but the newest ``keep`` checkpoints. What cannot be removed stays."""
    for path in checkpoints_in(folder)[:-keep]:
        # Renamed first: killed half way, it leaves no checkpoint that is cut short.
        leaving = path.with_name(path.name + PART)
        _remove(leaving)
        with suppress(OSError):
            _remove(path.rename(leaving))


def _remove(path: Path) -> None:
    """Remove a folder, or a link and not what it leads to."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _read(checkpoint: Path) -> tuple[Manifest | None, str]:
    """The manifest of a whole checkpoint, else what is wrong with it."""
    try:
        # Nothing is opened before it is known to be a file: a link leads elsewhere, and a pipe never ends.
        found = {path.name: path for path in checkpoint.iterdir()}
        for path in (checkpoint, *found.values()):
            if path.is_symlink():
                return None, f"{path.name} is a link, which the lab does not follow"
            if path != checkpoint and not path.is_file():
                return None, f"{abbreviate(repr(path.name))} is no file"
        manifest, damage = _manifest(found.pop(FILE, checkpoint / FILE))
        if manifest is None:
            return None, damage
        return (None, damage) if (damage := _damage(manifest, checkpoint, found)) else (manifest, "")
    except OSError as error:
        return None, f"it cannot be read: {error.strerror}"


def _manifest(path: Path) -> tuple[Manifest | None, str]:
    """The manifest in a file whose fields are of their kinds, else what is wrong with it."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        noted = document.pop(HASH, None)
        manifest, actual = Manifest(**document), _hash(document)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None, f"its {FILE} is missing or unreadable"
    for field, kind in _KINDS.items():
        value = getattr(manifest, field)
        if not isinstance(value, kind):
            return None, f"its {FILE} has {field}={abbreviate(repr(value))}"
    files = manifest.files or {}
    if not all(
        isinstance(noted, list) and [type(n) for n in noted] == [int, int] for noted in files.values()
    ):
        return None, f"its {FILE} has no sizes and checksums"
    family = manifest.config.get("model_type")
    if not isinstance(family, str) or family not in CONFIG_MAPPING:
        return None, f"its {FILE} has model_type={abbreviate(repr(family))}"
    if noted is None:
        return None, f"its {FILE} has no {HASH}: it was edited, or the version that wrote it can export it"
    if noted != actual:
        return None, f"its {FILE} was edited: its {HASH} is not the hash of its other fields"
    return manifest, ""


def _damage(manifest: Manifest, checkpoint: Path, found: dict[str, Path]) -> str:
    """What is wrong with a checkpoint whose other files are ``found``, by name; nothing if it is whole."""
    if name_of(manifest.step) != checkpoint.name:
        return f"its {FILE} has step={manifest.step}"
    for name, (size, checksum) in (manifest.files or {}).items():
        file = found.pop(name, None)
        actual = 0 if file is None else file.stat().st_size
        if file is None or actual != size:
            return f"{abbreviate(name)} has {actual} of its {size} bytes"
        if _checksum(file) != checksum:
            return f"{name} has other bytes than were written"
    return f"{abbreviate(repr(min(found)))} is not in its {FILE}" if found else ""


def _hash(document: dict[str, Any]) -> str:
    """Return the SHA-256 of the values of a document, whatever their order and the spaces between them."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(16 * MiB):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _differences(differing: dict[str, tuple[Any, ...]]) -> str:
    return ", ".join(
        f"{name} {abbreviate(str(there))} there and {abbreviate(str(here))} here"
        for name, (there, here) in differing.items()
    )
