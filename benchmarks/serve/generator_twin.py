"""The text generator with ``torch.distributed`` and gloo in the place of aiocomms; all else is shared.

    PYTHONPATH=examples aiocomms run -n 7 --listen 127.0.0.1:8000 -m benchmarks.serve.generator_twin

See ``generator_links``, which stands for ``text_generator.links``. A job cannot be mended: when a rank dies, the
launcher starts all ranks anew, and the front with them.
"""

from __future__ import annotations

import os
import sys
import traceback

from benchmarks.serve import generator_links

sys.modules["text_generator.links"] = generator_links  # before anything of the generator is imported

from text_generator import __main__, decode, front, prefill, serve  # noqa: E402, F401 - all that a rank needs


def main() -> None:
    """Be one rank, until the job ends."""
    front.PATIENCE = serve.LINGER = 0.0  # no group comes while this front is there
    code = 1
    try:
        __main__.main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)  # a thread may be blocked in gloo for ever


if __name__ == "__main__":
    main()
