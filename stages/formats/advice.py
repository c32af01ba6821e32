"""Which rule would make conversations of a file that is read string by string."""

import json
import re

from stages.splits import suffixes

_WORDS = (b"messages", b"conversations", b"prompt", b"chosen", b"instruction")
_HEAD = 4096  # bytes in which the words are looked for
# As it begins in JSON, in YAML, and in the schema of a table.
_MESSAGES = re.compile(rb'\b(messages|conversations|chosen)"?\s*:\s*(?:\[\s*\{|\n\s*-|(?:large_)?list<)')
_ROLE = re.compile(rb'\b(role|from)"?\s*:')
_ALPACA = re.compile(rb'\binstruction"?\s*:.*\boutput"?\s*:', re.DOTALL)
_PROMPT = re.compile(rb'\bprompt"?\s*:.*\b(completion|chosen)"?\s*:', re.DOTALL)


def find_advice(path: str, begin: bytes) -> list[str]:
    """Rules, at most one, for a file and those beside it, given its first bytes or its schema."""
    found = suffixes.find(path)
    assert found, "organize lists no other files"
    format, compression = found
    # Most files have none of the words, which `in` finds many times as fast as an expression does.
    head = begin[:_HEAD]
    if format in ("text", "csv", "tsv") or not any(word in head for word in _WORDS):
        return []
    messages, role = _MESSAGES.search(begin), _ROLE.search(begin)
    prompt = _PROMPT.search(begin)
    is_alpaca = _ALPACA.search(begin) is not None
    if not ((messages and role) or prompt or is_alpaca):
        return []
    columns = f"prompt: $.prompt, completion: $.{prompt[1].decode()}" if prompt else "format: alpaca"
    if messages and role:
        keys = ", role: from, content: value" if role[1] == b"from" else ""
        columns = f"messages: $.{messages[1].decode()}{keys}"
    plain = path[: len(path) - len(compression)]
    files = f"{path[: path.rfind('/') + 1]}*{path[plain.rfind('.') :]}"
    return [f"{{files: {json.dumps(files, ensure_ascii=False)}, {columns}}}"]
