"""The ranks as a pipeline: each has a stage of the model, and a micro-batch is a plan that goes through all of them.

    rank 0                            rank 1              ...    rank n-1
    Batcher ── plan ── stage 0 ─────> stage 1 ─> ...  ─────────> stage n-1
            <── vectors ───────────────────────────────────────────'

Every rank gets the plan, and waits in it for what the rank before it sends. A plan's messages meet no other plan's,
so several micro-batches are on the way at once, each in another stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyio import CapacityLimiter, to_thread

if TYPE_CHECKING:
    from torch import Tensor

    from aiocomms.serving import CurrentComm

    from .model import Stage


class Pipeline:
    """This rank's part of it.

    :param comm: what it holds; it stays valid when a stage is lost and replaced
    """

    def __init__(self, comm: CurrentComm, stage: Stage) -> None:
        self._comm = comm
        self._stage = stage
        self._thread = CapacityLimiter(1)  # micro-batches keep their order

    async def execute(self, plan: tuple[Tensor, Tensor]) -> Tensor:
        """Take a micro-batch through this rank's stage.

        :param plan: token ids, int64 `[texts, tokens]`, and how many of them each text has, int64 `[texts]`
        :returns: on rank 0 the vectors, float32 `[texts, 384]`
        """
        data, lengths = plan
        comm = self._comm
        if comm.rank > 0:
            data = await comm.recv_object(comm.rank - 1)
        # The event loop stays free meanwhile; if a stage is lost, nobody waits for the result.
        data = await to_thread.run_sync(self._stage, data, lengths, abandon_on_cancel=True, limiter=self._thread)
        if comm.size > 1:
            await comm.send_object(data, (comm.rank + 1) % comm.size)
            if comm.rank == 0:
                data = await comm.recv_object(comm.size - 1)
        return data
