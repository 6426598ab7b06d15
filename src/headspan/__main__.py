"""``python -m headspan`` is the command ``headspan``."""

from headspan.cli import main

main()
