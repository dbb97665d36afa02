"""The command ``aiocomms bench``: what an operation takes between ranks, in the way of nccl-tests and OSU's benchmarks.

``arguments`` says what is to be measured, ``start`` starts ranks where no launcher has, ``rank`` is what each of them
does, ``report`` and ``plot`` show what came out.
"""
