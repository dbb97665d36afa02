"""The conformance suite: tests of what every transport must do. They need only the transport's name.

::

    pytest --pyargs aiocomms.testing.conformance --transport=NAME

Each check is a coroutine function that every rank of a world runs, on the numbers of ranks that can decide something.
The ranks share one process if the transport can do that (:attr:`~aiocomms.transport.Capabilities.in_process`) and its
name is not followed by ``@processes``; otherwise each is a process. If events must happen in a known order, the ranks
send each other notes beside the transport (:meth:`~aiocomms.testing.conformance.case.Case.tell`).

A check runs only in places where it can find a fault, which its marks say. With ``--full`` it runs everywhere:

==========  ========================================================================================================
mark        the check runs
==========  ========================================================================================================
(none)      on every transport that is named, on the first loop
``loops``   on every loop, as it exercises differences between the loops
``core``    on the first transport, and on each that has native shortcuts, as the core decides its outcome
``memory``  on ``NAME``, and again on ``NAME@processes``; other checks run on ``NAME`` only
==========  ========================================================================================================

Two more marks change nothing. ``clock`` is on checks that wait for a real clock. ``network`` is on checks whose ranks
connect by the network beside their transport.

==============  ==================================================================================================
module          content
==============  ==================================================================================================
``test_*``      the checks
``trials``      every collective, with data to send and the result that is expected
``data``        random tensors, guarded memory, and reductions by plain torch
``case``        the object that a check gets beside its communicator
``rank``        how one rank runs a check
``tasks``       worlds whose ranks are tasks of one loop
``processes``   worlds whose ranks are processes
``leaks``       threads and descriptors that a check has left behind
``matrix``      the places in which a check runs
``options``     the options: ``--transport --full --ranks --loops --device --deadline --seed``
==============  ==================================================================================================
"""
