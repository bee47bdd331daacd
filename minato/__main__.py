"""``python -m minato``, the same as the command ``minato``."""

import sys

from minato.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
