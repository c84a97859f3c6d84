"""What may stand on the page: text from a run, escaped, and a policy under which nothing else acts.

Invariant: the page loads nothing, sends nothing, and runs the one script that it was written with.
"""

import base64
import hashlib
import html

from trainer_hook.printable import printable


def escape(text: str) -> str:
    """Text of whatever origin, as HTML that shows it."""
    return html.escape(printable(text, lines=True))


def policy(script: str) -> str:
    """The Content-Security-Policy of a page with this script. The charts place their labels by styles."""
    content = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return f'<meta http-equiv="Content-Security-Policy" content="{content}">'


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
