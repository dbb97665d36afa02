"""Background tasks of an object."""

from __future__ import annotations

import asyncio

import anyio
import pytest
from concurrency import cancel_again_and_again

from aiocomms.progress.background import Background

pytestmark = pytest.mark.deterministic


def test_close_that_is_cancelled_again_and_again_waits_for_the_tasks() -> None:
    async def main() -> None:
        begun, go, background = asyncio.Event(), asyncio.Event(), Background("a test")

        async def call() -> None:
            begun.set()
            with anyio.CancelScope(shield=True):
                await go.wait()

        background.start(call)
        await begun.wait()
        close = asyncio.ensure_future(background.aclose())
        await cancel_again_and_again(close)
        go.set()
        await asyncio.wait([close])
        assert close.cancelled()

    asyncio.run(main())
