"""The entry point of ``python -m aiocomms``."""

from __future__ import annotations

import sys

from aiocomms.cli import main

if __name__ == "__main__":
    sys.exit(main())
