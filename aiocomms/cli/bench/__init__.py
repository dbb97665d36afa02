"""The command ``aiocomms bench``: the time of operations between ranks, as nccl-tests and OSU's benchmarks take it.

``arguments`` says what is to be measured, ``start`` starts ranks where no launcher has, ``rank`` is what each of them
does, ``report`` and ``plot`` show what came out.
"""
