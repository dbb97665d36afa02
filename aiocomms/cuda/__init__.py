"""CUDA on the event loop: the public names for streams and events that are awaited."""

from aiocomms.cuda.streams import SPIN as SPIN
from aiocomms.cuda.streams import Completions as Completions
from aiocomms.cuda.streams import Cuda as Cuda
from aiocomms.cuda.streams import Event as Event
from aiocomms.cuda.streams import Stream as Stream
from aiocomms.cuda.streams import TorchCuda as TorchCuda
from aiocomms.cuda.streams import no_gpu as no_gpu
from aiocomms.cuda.streams import recorded as recorded
