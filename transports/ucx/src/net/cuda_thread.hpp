// What a thread needs before it may drive CUDA through UCX. The driver is looked up at run time: the engine is built,
// and runs, where there is none.
#pragma once

#include <dlfcn.h>

namespace aiocomms {

class CudaThread {
 public:
  // On a thread that has the GPU's context.
  CudaThread() {
    if (driver_ == nullptr) return;
    if (auto current = reinterpret_cast<int (*)(void**)>(dlsym(driver_, "cuCtxGetCurrent"))) current(&context_);
  }

  // On another one: take the same context, and let calls from here not break a capture into a graph elsewhere.
  void enter() const {
    if (context_ == nullptr) return;
    int mode = kThreadLocal;
    if (auto take = reinterpret_cast<int (*)(void*)>(dlsym(driver_, "cuCtxSetCurrent"))) take(context_);
    if (auto exchange = reinterpret_cast<int (*)(int*)>(dlsym(driver_, "cuThreadExchangeStreamCaptureMode"))) {
      exchange(&mode);
    }
  }

 private:
  static constexpr int kThreadLocal = 1;              // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
  void* driver_ = dlopen("libcuda.so.1", RTLD_LAZY);  // never closed: CUDA does not expect it
  void* context_ = nullptr;
};

}  // namespace aiocomms
