// The functions of CUDA's runtime and NCCL that the launcher calls. The maker of a launcher passes their addresses. So
// this code builds and runs without both libraries, and tests pass their own functions.
#pragma once

#include <cstddef>

namespace aiocomms {

using GpuStream = void*;  // a cudaStream_t
using GpuEvent = void*;   // a cudaEvent_t
using NcclComm = void*;   // an ncclComm_t

struct GpuApi {
  int (*get_device)(int*) = nullptr;
  int (*set_device)(int) = nullptr;
  int (*exchange_capture_mode)(int*) = nullptr;
  const char* (*error_string)(int) = nullptr;
  int (*last_error)() = nullptr;
  int (*event_create)(GpuEvent*, unsigned) = nullptr;
  int (*event_destroy)(GpuEvent) = nullptr;
  int (*event_record)(GpuEvent, GpuStream) = nullptr;
  int (*event_query)(GpuEvent) = nullptr;
  int (*event_synchronize)(GpuEvent) = nullptr;
  int (*stream_wait_event)(GpuStream, GpuEvent, unsigned) = nullptr;
  int (*memcpy_async)(void*, const void*, std::size_t, int, GpuStream) = nullptr;
  int (*group_start)() = nullptr;
  int (*group_end)() = nullptr;
  int (*all_reduce)(const void*, void*, std::size_t, int, int, NcclComm, GpuStream) = nullptr;
  int (*reduce)(const void*, void*, std::size_t, int, int, int, NcclComm, GpuStream) = nullptr;
  int (*broadcast)(const void*, void*, std::size_t, int, int, NcclComm, GpuStream) = nullptr;
  int (*all_gather)(const void*, void*, std::size_t, int, NcclComm, GpuStream) = nullptr;
  int (*reduce_scatter)(const void*, void*, std::size_t, int, int, NcclComm, GpuStream) = nullptr;
  int (*send)(const void*, std::size_t, int, int, NcclComm, GpuStream) = nullptr;
  int (*recv)(void*, std::size_t, int, int, NcclComm, GpuStream) = nullptr;

  static constexpr int kNotReady = 600;      // cudaErrorNotReady
  static constexpr unsigned kSleepsOn = 3;   // cudaEventBlockingSync | cudaEventDisableTiming
  static constexpr int kDeviceToDevice = 3;  // cudaMemcpyDeviceToDevice
  static constexpr int kThreadLocal = 1;     // cudaStreamCaptureModeThreadLocal
  static constexpr int kNcclInProgress = 7;  // a nonblocking communicator has accepted the call

  // Calls visit(name, function) for each function.
  template <typename Visit>
  void each(Visit visit) {
    visit("cudaGetDevice", get_device);
    visit("cudaSetDevice", set_device);
    visit("cudaThreadExchangeStreamCaptureMode", exchange_capture_mode);
    visit("cudaGetErrorString", error_string);
    visit("cudaGetLastError", last_error);
    visit("cudaEventCreateWithFlags", event_create);
    visit("cudaEventDestroy", event_destroy);
    visit("cudaEventRecord", event_record);
    visit("cudaEventQuery", event_query);
    visit("cudaEventSynchronize", event_synchronize);
    visit("cudaStreamWaitEvent", stream_wait_event);
    visit("cudaMemcpyAsync", memcpy_async);
    visit("ncclGroupStart", group_start);
    visit("ncclGroupEnd", group_end);
    visit("ncclAllReduce", all_reduce);
    visit("ncclReduce", reduce);
    visit("ncclBroadcast", broadcast);
    visit("ncclAllGather", all_gather);
    visit("ncclReduceScatter", reduce_scatter);
    visit("ncclSend", send);
    visit("ncclRecv", recv);
  }
};

}  // namespace aiocomms
