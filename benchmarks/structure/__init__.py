"""How the code is built, in figures: what a reader of one checkout, or of two, would otherwise count by hand.

``python -m benchmarks.structure [ROOT]`` prints a Markdown table of a checkout (this one, unless told), and
``python -m benchmarks.structure BEFORE AFTER`` one with two columns. ``--calls`` lists what is called, too.
The sources are read, and for the ways run, from the checkout itself, of any layout; other packages and the entry points
of the transports are those of the interpreter's environment. The figures of ``ucx`` are ``n/a`` without an engine that
was built in the checkout, in ``transports/ucx/build`` or ``.venv``.

What is counted:

- **modules**: ``.py`` files directly in a folder, ``__init__.py`` too.
- **floors**: modules of the longest chain of imports within ``aiocomms``, at module level and not for types only; a
  circle counts as one. **circles**: sets of modules each of which imports all others of the set, directly or not.
- **private names used across modules**: places where ``x._name`` (``x`` is neither ``self`` nor ``cls``) or ``from x
  import _name`` stands in a module that does not define ``_name``, while another one of the library does; distinct:
  each name counted once for a module.
- **imported by a transport**: modules of ``aiocomms`` that its package names in imports, for types too.
- **attributes, public methods** of a class and of those that it inherits from: names in their bodies (annotated or
  assigned, in ``__slots__``, properties) and those assigned to ``self``; functions.
- **Engine**: declarations in the body of the C++ class. Data members end in ``_``; overloads count once.
- **ways**: calls, files, and changes of file. A call is each ``call`` event of :func:`sys.setprofile` in Python code
  of the checkout's ``aiocomms`` and ``transports``, on any thread that :mod:`threading` started: functions,
  comprehensions, and each time that a generator or coroutine goes on. A change is each call or return that leads into
  another file than the event before did; all files outside of the checkout are one. Each way begins when all is quiet,
  after :data:`~benchmarks.structure.probe.ROUNDS` rounds of an ``all_reduce`` and a message, which the flight recorder
  remembers:

  - *all_reduce*: from the call to the value. With 2 ranks on ``local``, the rank that completes it, with what that does
    for the other; on ``ucx`` in a world of one, which is what a rank does for which the others have waited.
  - *cancelled recv*: from the cancellation of the task that awaits a recv to the task's end.
  - *peer's death*: of two processes one awaits a recv of the other, and kills it with SIGKILL. From there until the
    awaiting task is woken, which then gets ``PeerDiedError``. What other threads do in the meantime counts. The median
    of :data:`~benchmarks.structure.ways.DEATHS` deaths.
"""
