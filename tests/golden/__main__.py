"""python -m tests.golden record|check [--quick] [NAME...]

Records are files in tests/golden/records/, one per text or per group of tokens. NAME may be a common prefix. `check`
prints each difference and exits with 1. `record` writes the files; review the change with git.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.golden import product
from tests.golden.records import check_text, check_tokens, names, record_text, record_tokens
from tests.golden.texts import TEXTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("action", choices=["record", "check"])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="only the cases of the default test suite")
    options = parser.parse_args()
    if options.quick and options.action == "record":
        parser.error("--quick: a record has every case")
    chosen = [name for name in names() if not options.names or name.startswith(tuple(options.names))]
    if not chosen:
        parser.error(f"no record of that name; there are: {', '.join(names())}")
    num_wrong = 0
    with tempfile.TemporaryDirectory() as place, product.redis_at("127.0.0.1", Path(place)) as redis_url:
        for name in chosen:
            begin = time.monotonic()
            if name in TEXTS:
                differences = record_text(name) if options.action == "record" else check_text(name)
            elif options.action == "record":
                differences = record_tokens(name, Path(place), redis_url)
            else:
                result = check_tokens(name, Path(place), redis_url, only_quick=options.quick)
                differences, notes = result.wrong, result.notes
                print("".join(f"  {name}: {note}\n" for note in notes), end="")
            num_wrong += bool(differences)
            print(f"{'FAIL' if differences else 'ok  '} {name} ({time.monotonic() - begin:.1f} s)", flush=True)
            print("".join(f"  {line}\n" for line in differences), end="", flush=True)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
