"""``python -m hyperfed`` is the ``hyperfed`` command."""

from hyperfed.cli import main

if __name__ == "__main__":
    main()
