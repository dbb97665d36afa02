"""The conformance suite: tests of the rules for all transports. The tests need only the transport's name.

::

    pytest --pyargs aiocomms.testing.conformance --transport=NAME

Each check is a coroutine function that every rank runs. A check runs with the numbers of ranks that can change its
result. The ranks share one process if the transport supports that (:attr:`~aiocomms.transport.Capabilities.in_process`)
and its name does not end in ``@processes``. Otherwise each rank is a process. If events must happen in a known order,
the ranks send each other notes, but not by the transport (:meth:`~aiocomms.testing.conformance.case.Case.tell`).

By default, a check runs only where it can find a fault. The marks of a check tell these places. With ``--full``, each
check runs everywhere:

==========  ========================================================================================================
mark        the check runs
==========  ========================================================================================================
(none)      on every chosen transport, on the first loop
``loops``   on every loop, because the check depends on the loop
``core``    on the first transport, and on each transport with native shortcuts, because the core decides the outcome
``memory``  on both ``NAME`` and ``NAME@processes``, if both are chosen. Other checks then run on ``NAME`` only
==========  ========================================================================================================

Two more marks do not change the places: ``clock`` marks checks that wait for a real clock, and ``network`` marks checks
that open endpoints, which use the network with every transport.

==============  ==================================================================================================
module          content
==============  ==================================================================================================
``test_*``      the checks
``trials``      every collective, with data to send and the expected result
``data``        random tensors, guarded memory, and reductions by plain torch
``case``        the object that a check gets besides its communicator
``rank``        how one rank runs a check
``tasks``       worlds whose ranks are tasks of one loop
``processes``   worlds whose ranks are processes
``leaks``       threads and descriptors that a check has left behind
``matrix``      the places in which a check runs
``options``     the options: ``--transport --full --ranks --loops --device --deadline --seed``
==============  ==================================================================================================
"""
