"""Nothing that a run wrote acts on the page."""

import base64
import hashlib
import re

from fa_rollout.records.history import History
from fa_rollout.report.html import escape
from fa_rollout.report.page import page
from fa_rollout.report.summary import summarize


def test_text_of_a_run_neither_ends_an_element_nor_turns_the_reading_order() -> None:
    assert escape('<b>"\u202e\x1b\n') == "&lt;b&gt;&quot;\\u202e\\x1b\n"


def test_the_page_allows_its_own_script_and_nothing_else() -> None:
    text = page(summarize(History()))
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert text.index("Content-Security-Policy") < text.index("<style>") < text.index("<script>")
