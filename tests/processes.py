"""Commands run to their end, and pages opened in a real browser."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def ran(*command: str | Path, **options: Any) -> subprocess.CompletedProcess:
    """Run a command; what it prints is kept as text."""
    return subprocess.run(command, **{"capture_output": True, "text": True, "check": False, **options})


def opened(page: Path, *options: str) -> dict[str, Any]:
    """Open a page without a window and return the JSON that its script leaves in `<pre id="out">`."""
    done = ran(
        str(BROWSER),
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
        *("--allow-file-access-from-files", f"--user-data-dir={page.parent / 'profile'}"),
        *("--virtual-time-budget=5000", "--window-size=1500,1000", "--dump-dom", *options, page.as_uri()),
        timeout=120,
    )
    match = re.search(r'<pre id="out">(\{.*\})</pre>', done.stdout, flags=re.DOTALL)
    assert match, done.stderr[-2000:]
    return json.loads(html.unescape(match[1]))
