"""The last lines of ./test.sh: the stages that broke, the tests that failed, what differs from the locks, and the sum.

Reads what the stages left in build/results: NAME.xml by pytest, NAME.txt by `pip freeze`, NAME being that of a lock.
"""

import argparse
import collections
import pathlib
import re
import sys
from xml.etree import ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build/results"
LOCKS = ROOT / "bazel/locks"


def pins(path):
    """`{package: version}` of a lock, or of what `pip freeze` printed."""
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", path.read_text(), re.M))


def differences(name):
    """Yields a line for each package that is not installed as the lock has it. A lock holds packages of all extras."""
    lock = LOCKS / f"{name}.txt"
    locked = pins(lock) if lock.exists() else {}
    for package, version in pins(RESULTS / f"{name}.txt").items():
        if version != locked.get(package):
            yield f"{package} {version}, in the lock {locked.get(package, 'not at all')}"


def outcome(case):
    for kind, meaning in (("error", "failed"), ("failure", "failed"), ("skipped", "skipped")):
        if case.find(kind) is not None:
            return meaning
    return "passed"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--broken", action="append", default=[], help="a stage that failed")
    parser.add_argument("--locked", action="store_true", help="a package that is not as in its lock is a failure")
    args = parser.parse_args()
    for frozen in sorted(RESULTS.glob("*.txt")):
        if differ := list(differences(frozen.stem)):
            print(f"\nNot as in {frozen.name} of bazel/locks:", *differ, sep="\n  ")
            if args.locked:
                args.broken.append(f"bazel/locks/{frozen.name} (./test.sh lock renews it)")
    counts = collections.Counter()
    for path in sorted(RESULTS.glob("*.xml")):
        cases = list(ElementTree.parse(path).iter("testcase"))
        counts.update(map(outcome, cases))
        if failed := [case for case in cases if outcome(case) == "failed"]:
            # A file that could not be collected has one name alone.
            names = ("::".join(filter(None, (case.get("classname"), case.get("name")))) for case in failed)
            print(f"\nFailed in {path.stem}:", *names, sep="\n  ")
    if args.broken:
        print("\nBroken:", *args.broken, sep="\n  ")
    skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
    print(f"\n{counts['passed']} passed, {counts['failed']} failed{skipped}")
    return 1 if args.broken or counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
