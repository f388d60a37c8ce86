"""What planning commands print, as text in README.md and lab/bench/README.md."""

import re
from collections.abc import Iterator
from pathlib import Path

from lab.commands.base import DOES_NOT_FIT
from lab_tests.support.commands import invoke

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "lab" / "bench" / "README.md")
PLANNING = r"(?:plan|ladder|fit|max-context|bench published|bench results)\b"
PRINTED = re.compile(rf"(?<=```text\n)\$ lab ({PLANNING}[^\n]*)\n(.*?)(?=\n```)", re.DOTALL)


def stored() -> dict[str, str]:
    """Return what the pages say that each command prints."""
    return {command: text for page in PAGES for command, text in PRINTED.findall(page.read_text())}


def printed(command: str) -> str:
    """Return what a command prints."""
    run = invoke(command)
    assert run.exit_code in (0, DOES_NOT_FIT), run.stderr
    return run.stdout.rstrip("\n")


def without_seconds(text: str) -> str:
    """Return a text without the seconds that planning took."""
    return re.sub(r"(?m)^planned in .*\n?", "", text)


def write_pages(say) -> Iterator[dict[str, str]]:
    """Write what each command prints into its page, and yield a row for each: whether its text changed."""
    for page in PAGES:
        for command, before in PRINTED.findall(page.read_text()):
            say(command)
            now = printed(command)
            same = without_seconds(now) == without_seconds(before)
            if not same:
                page.write_text(
                    page.read_text().replace(f"$ lab {command}\n{before}\n", f"$ lab {command}\n{now}\n")
                )
            yield {"command": f"lab {command}", "text": "kept" if same else "written"}
