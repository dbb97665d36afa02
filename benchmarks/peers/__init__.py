"""Ours and its peers side by side: what :mod:`benchmarks.compare` is made of.

``rows`` says what is measured and what it must reach, ``cases`` makes and checks the data, the contenders are in
``ours``, ``mpich``, ``gloo`` and ``ucxx_asyncio``, each run by ``worker`` in processes that ``world`` starts and
commands; ``perftest`` runs UCX's own benchmark, ``probes`` and ``special`` measure what is no race, ``report`` prints.
"""
