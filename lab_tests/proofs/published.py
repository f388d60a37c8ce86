"""What other people measured, compared with plans, as text in the page of results."""

import re
from pathlib import Path

from lab.bench.published import compare_all, measured, published_text

PAGE = Path(__file__).parents[2] / "lab" / "bench" / "README.md"
COMMAND = "$ lab bench published\n"


def stored(page: str) -> str:
    """Return what the page says that the command prints."""
    [(_, text)] = re.findall(rf"(```text\n{re.escape(COMMAND)})(.*?)\n```", page, re.DOTALL)
    return text


def write_published(say) -> None:
    """Write what the command prints into the page."""
    page = PAGE.read_text()
    PAGE.write_text(page.replace(stored(page), published_text(compare_all(measured(), say))))
