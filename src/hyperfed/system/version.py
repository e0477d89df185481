"""Which hyperfed this is."""

from importlib import metadata

try:
    VERSION = metadata.version("hyperfed")
except metadata.PackageNotFoundError:  # run from a checkout that was never installed
    VERSION = "0+unknown"
