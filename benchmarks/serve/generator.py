"""The text generator of the examples under its supervisor; see ``generator_twin``, which is started in the same way."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from text_generator import supervisor

if __name__ == "__main__":
    supervisor.main()
