"""The command ``aiocomms bench``: the time of operations between ranks, as nccl-tests and OSU's benchmarks measure it.

``arguments`` makes the plan of measurements. ``start`` starts the ranks if no launcher has. ``rank`` is the part of
each rank. ``report`` and ``plot`` show the results.
"""
