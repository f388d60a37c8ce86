"""The line of a log that says why a process ended."""

import re
from pathlib import Path

_ERROR_WORDS = re.compile(
    r"error|fatal|critical|refused|denied|failed|cannot|could not|unable|no such|not found|timed out|invalid"
    r"|no route|unreachable|sees \d",
    re.I,
)


def last_error(directory: str | Path, name: str) -> str:
    """Return the last line of a log that reports an error, or its last line where no line does.

    Args:
        directory: The directory of the cluster, which has the folder `log`.
        name: The name of the log file.
    """
    try:
        text = (Path(directory) / "log" / name).read_text(errors="replace")
    except OSError as error:
        return f"its log cannot be read ({error.strerror})"
    lines = [line.strip() for line in text.splitlines() if line.strip(" -*")]
    errors = [line for line in lines if _ERROR_WORDS.search(line)]
    return (errors or lines or ["its log is empty"])[-1]
