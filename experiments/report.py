"""Draws a run's report: `python -m experiments.report runs/quickstart` writes `report.html` there."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rl_posttrain.observability import report


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m experiments.report", description=__doc__)
    parser.add_argument("workdir", help="the run's folder; the run may still be going on")
    arguments = parser.parse_args(argv)
    try:
        path = report.render(arguments.workdir)
    except FileNotFoundError as error:
        parser.error(str(error))
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
