"""Flow `compare`: the differences of two models or runs, reported in Prefect and MLflow."""

import argparse
import sys

from prefect import flow

from megacore.errors import MegacoreError
from tasks._cli import require_server
from tasks._environment import check_proxies
from tasks.compare import compare as compare_sides


@flow(name="compare", validate_parameters=False)
def compare(a: str, b: str, kind: str | None = None) -> bool:
    """Compare two models or runs; return True if they are equal.

    `a` and `b` are paths, or keys or names of runs. `kind` is models or runs; None decides by what
    they are.
    """
    return bool(compare_sides(a, b, kind)["equal"])


def main() -> int:
    """Run the flow from the command line, and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m flows.compare", description=compare.__doc__)
    parser.add_argument("a", help="checkpoint, export, foreign directory, or run")
    parser.add_argument("b", help="the one to compare with it")
    parser.add_argument("--as", dest="kind", choices=("models", "runs"))
    arguments = parser.parse_args()
    try:
        check_proxies()
        require_server()
        return 0 if compare(arguments.a, arguments.b, arguments.kind) else 1
    except MegacoreError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
