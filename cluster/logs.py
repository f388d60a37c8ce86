"""The line of a log that says why a process ended."""

import re
from pathlib import Path

_TELLING = re.compile(
    r"error|fatal|critical|refused|denied|failed|cannot|could not|unable|no such|not found|timed out|invalid"
    r"|no route|unreachable|sees \d",
    re.I,
)


def telling_line(directory: str | Path, name: str) -> str:
    """Return the last line of DIRECTORY/log/NAME that says what is wrong, or its last line at all."""
    try:
        text = (Path(directory) / "log" / name).read_text(errors="replace")
    except OSError as error:
        return f"its log cannot be read ({error.strerror})"
    lines = [line.strip() for line in text.splitlines() if line.strip(" -*")]
    telling = [line for line in lines if _TELLING.search(line)]
    return (telling or lines or ["its log is empty"])[-1]
