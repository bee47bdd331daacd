"""``python -m minato``, the same as the command ``minato``."""

import sys

from minato.cli import start

if __name__ == "__main__":
    sys.exit(start())
