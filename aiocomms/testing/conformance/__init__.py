"""The conformance suite: what every transport must do, as tests that need nothing but the transport's name.

::

    pytest --pyargs aiocomms.testing.conformance --transport=NAME

Each check is a coroutine function that every rank of a world runs: over asyncio, uvloop and trio, and over 1, 2, 3, 4
and 7 ranks where their number matters; in one process where the transport can
(:attr:`~aiocomms.transport.Capabilities.in_process`), else in real ones. What the ranks need to tell each other so that
things happen in a known order goes beside the transport (:meth:`~aiocomms.testing.conformance.case.Case.tell`).

==============  ==================================================================================================
module          what is in it
==============  ==================================================================================================
``test_*``      the checks
``trials``      every operation with data to send and what must come of it
``data``        random tensors, guarded memory, what plain torch makes of the data
``case``        what a check is given beside its communicator
``rank``        one rank's side of running a check
``tasks``       worlds whose ranks are tasks of one loop
``processes``   worlds whose ranks are processes
``options``     the options: ``--transport --processes --ranks --loops --device --deadline --seed``
==============  ==================================================================================================
"""
