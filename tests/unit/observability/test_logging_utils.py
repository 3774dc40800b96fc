"""The one log format of all processes."""

import subprocess
import sys


def test_lines_have_time_file_and_line_and_a_second_call_adds_nothing():
    code = (
        "import logging\n"
        "from slime.observability.logging_utils import configure_logging\n"
        "configure_logging(); configure_logging(logging.DEBUG)\n"
        "logging.getLogger('httpx').info('chatter')\n"
        "logging.getLogger('a').info('hello'); logging.getLogger('a').debug('detail')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("[") and lines[0].endswith("] <string>:5 - hello")
    assert result.stdout == ""
