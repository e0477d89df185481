"""Which code a result comes from."""

import os
import platform
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import torch

from hyperfed.system.version import VERSION


def versions() -> dict[str, str]:
    """Returns the versions that a result may depend on."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "hyperfed": VERSION,
    }


@cache
def commit() -> str | None:
    """Returns the git commit of this code, with "-dirty" where files differ from it.

    None where the code is not in a checkout of its own, such as an installed package. Git is asked
    once: this process goes on with the code that it has imported, whatever becomes of the files.
    """
    here = Path(__file__)
    # Inside a git hook these name another repository.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments],
                cwd=here.parent,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError:  # no git on this machine
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # A virtual environment may lie in somebody else's checkout, which does not track this file.
    if git("ls-files", "--error-unmatch", here.name) is None:
        return None
    return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
