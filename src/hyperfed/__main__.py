"""``python -m hyperfed`` is the ``hyperfed`` command."""

from hyperfed.apps.cli import main

if __name__ == "__main__":
    main()
