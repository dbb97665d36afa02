"""The nccl and ucx transports on one GPU, beside torch.distributed's NCCL in the same processes and the same run.

``targets`` says what is to be reached, ``measures`` measures, ``stage`` is the GPU under it (the tests give another
one), ``ticks`` is the heartbeat, ``rank`` runs in the processes that ``__main__`` starts, ``onegpu`` lets several ranks
share a GPU, ``report`` prints. docs/benchmarks/gpu.md says how it measures.
"""
