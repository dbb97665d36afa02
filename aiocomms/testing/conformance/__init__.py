"""The conformance suite: what every transport must do, as tests that need nothing but the transport's name.

::

    pytest --pyargs aiocomms.testing.conformance --transport=NAME

Each check is a coroutine function that every rank of a world runs: over asyncio, uvloop and trio, and over 1, 2, 3, 4
and 7 ranks where their number matters. The ranks share one process if the transport can do that
(:attr:`~aiocomms.transport.Capabilities.in_process`); otherwise each is a process. Where events must happen in a known
order, the ranks tell each other by a channel beside the transport
(:meth:`~aiocomms.testing.conformance.case.Case.tell`).

==============  ==================================================================================================
module          content
==============  ==================================================================================================
``test_*``      the checks
``trials``      every collective, with data to send and the result that is expected
``data``        random tensors, guarded memory, and reductions by plain torch
``case``        what a check is given beside its communicator
``rank``        how one rank runs a check
``tasks``       worlds whose ranks are tasks of one loop
``processes``   worlds whose ranks are processes
``options``     the options: ``--transport --processes --ranks --loops --device --deadline --seed``
==============  ==================================================================================================
"""
