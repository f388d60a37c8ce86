"""The pages have what planning commands print."""

import re

import pytest

from lab_tests.proofs.pages import PAGES, PLANNING, printed, stored, without_seconds
from lab_tests.support.long_run import mostly_long

STORED = stored()


def test_each_printed_plan_of_the_pages_is_compared():
    commands = [
        command for page in PAGES for command in re.findall(rf"(?m)^\$ lab ({PLANNING}.*)", page.read_text())
    ]
    assert commands == [*STORED]
    assert {command.split()[0] for command in commands} == {"plan", "ladder", "fit", "max-context", "bench"}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("command", mostly_long(STORED, 0))
def test_a_page_has_what_the_command_prints(command):
    assert without_seconds(printed(command)) == without_seconds(STORED[command])
