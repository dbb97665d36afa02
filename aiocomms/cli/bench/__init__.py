"""The command ``aiocomms bench``, which measures operations as nccl-tests and OSU's benchmarks do.

The module ``arguments`` makes the plan of measurements. ``start`` starts the ranks, unless a launcher has started them.
``rank`` contains the code that each rank runs. ``report`` and ``plot`` show the results.
"""
