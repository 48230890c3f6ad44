"""Pages read strictly, and opened in a real browser."""

import html
import html.parser
import json
import re
import shutil
from pathlib import Path
from typing import Any

from processes import ran

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
VOID = {"meta", "br"}


class Strict(html.parser.HTMLParser):
    """Refuses what a forgiving browser would mend, scripts, and whatever is loaded from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.counted: dict[str, int] = {}
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        names = [name for name, _ in attributes]
        assert len(names) == len(set(names)), tag
        assert not any(name.startswith("on") or name in ("src", "href", "srcset", "data") for name in names), tag
        assert tag != "script"
        self.counted[tag] = self.counted.get(tag, 0) + 1
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


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
