"""CUDA on the event loop: the public names with which programs await streams and events."""

from aiocomms.cuda.device import Cuda as Cuda
from aiocomms.cuda.device import Event as Event
from aiocomms.cuda.device import Stream as Stream
from aiocomms.cuda.device import TorchCuda as TorchCuda
from aiocomms.cuda.device import check_stream as check_stream
from aiocomms.cuda.device import no_gpu as no_gpu
from aiocomms.cuda.ipc import Mapped as Mapped
from aiocomms.cuda.ipc import Shared as Shared
from aiocomms.cuda.marks import CallerMark as CallerMark
from aiocomms.cuda.marks import CallerMarks as CallerMarks
from aiocomms.cuda.runtime import addresses as addresses
from aiocomms.cuda.streams import SPIN as SPIN
from aiocomms.cuda.streams import Completions as Completions
from aiocomms.cuda.streams import recorded as recorded
