"""Prepare an environment with the oldest versions that pyproject.toml accepts, for `make test-oldest`.

    python tests/oldest.py ENVIRONMENT

makes the packages of the current Python visible in ENVIRONMENT, and writes ENVIRONMENT/oldest.txt, the requirements to
install over them.
"""

import re
import sys
import sysconfig
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
# Not downgraded: torch is large, and triton requires a GPU. lm-eval is tested with the newest versions only.
KEPT = {"torch", "triton", "lm-eval"}


def requirements() -> list[str]:
    """Return all dependencies, including those of the extras for users, at their lower bounds."""
    extras = PROJECT["optional-dependencies"]
    declared = [*PROJECT["dependencies"], *(line for name in extras if name != "dev" for line in extras[name])]
    bounds = [re.fullmatch(r"([\w.-]+)(?:\[.*\])?>=([\d.]+)(?:;.*)?", line) for line in declared]
    if None in bounds:
        raise SystemExit(f"not of the form NAME>=VERSION: {declared[bounds.index(None)]}")
    return [f"{bound[1]}=={bound[2]}" for bound in bounds if bound and bound[1] not in KEPT]


def main(environment: Path) -> None:
    # addsitedir, unlike a plain path, also finds the editable installation of t2r.
    there = sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)})
    Path(there, "over.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    (environment / "oldest.txt").write_text("\n".join(requirements()) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
