"""The command ``aiocomms bench``, which measures the time of operations, like nccl-tests and OSU's benchmarks.

The module ``arguments`` makes the plan of measurements. ``start`` starts the ranks, unless a launcher has started them.
``rank`` runs on each rank. ``report`` and ``plot`` show the results.
"""
