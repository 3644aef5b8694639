"""The oldest versions that pyproject.toml accepts, as requirements: `make test-oldest` installs them.

    python tests/oldest.py ENVIRONMENT

makes ENVIRONMENT see the packages of the Python that runs this, and writes ENVIRONMENT/oldest.txt: what is to be
installed over them.
"""

import re
import sys
import sysconfig
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
# Used as they are: torch is large, triton needs a GPU. lm-eval is tested with the newest versions only.
KEPT = {"torch", "triton", "lm-eval"}


def requirements() -> list[str]:
    """Every dependency, and those of the extras for users, at its lower bound."""
    extras = PROJECT["optional-dependencies"]
    declared = [*PROJECT["dependencies"], *(line for name in extras if name != "dev" for line in extras[name])]
    bounds = [re.fullmatch(r"([\w.-]+)(?:\[.*\])?>=([\d.]+)(?:;.*)?", line) for line in declared]
    if None in bounds:
        raise SystemExit(f"not of the form NAME>=VERSION: {declared[bounds.index(None)]}")
    return [f"{bound[1]}=={bound[2]}" for bound in bounds if bound and bound[1] not in KEPT]


def main(environment: Path) -> None:
    # addsitedir, unlike a plain path, also finds t2r itself, which is installed in place.
    there = sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)})
    Path(there, "over.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    (environment / "oldest.txt").write_text("\n".join(requirements()) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
