"""Write sample conversations about small numbers: a file to try fine-tuning with.

    python -m scripts.sample_conversations data/raw/chat/sums.jsonl

Each line is a record `{"messages": [...]}`, as chat APIs have it. The same number of them gives the same bytes.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.base import publish

_SYSTEM = "You answer with one short sentence."


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--conversations", type=int, default=400, metavar="N", help="default: %(default)s")
    args = parser.parse_args()
    args.file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"messages": [*messages(number)]}) for number in range(args.conversations)]
    publish.write_text(args.file, "".join(f"{line}\n" for line in lines))
    print(f"sample conversations: {len(lines)} in {args.file}")


def messages(number: int) -> Iterator[dict[str, Any]]:
    """One conversation: two questions about numbers, the second of which needs the first."""
    a, b = number % 20, number // 20 % 20
    yield {"role": "system", "content": _SYSTEM}
    yield {"role": "user", "content": f"What is {a} plus {b}?"}
    yield {"role": "assistant", "content": f"{a} plus {b} is {a + b}."}
    yield {"role": "user", "content": "Is that an even number?"}
    yes, kind = ("Yes", "even") if (a + b) % 2 == 0 else ("No", "odd")
    yield {"role": "assistant", "content": f"{yes}, {a + b} is {kind}."}


if __name__ == "__main__":
    main()
