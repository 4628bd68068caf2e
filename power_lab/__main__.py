"""`python -m power_lab` is the command `power-lab`."""

import sys

from power_lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
