// The setup that a thread needs before it drives CUDA through UCX. The driver is loaded at run time, so the engine
// builds and runs on hosts without it.
#pragma once

#include <dlfcn.h>

namespace aiocomms {

class CudaThread {
 public:
  // Runs on a thread that has the GPU's context.
  CudaThread() {
    if (driver_ == nullptr) return;
    if (auto current = reinterpret_cast<int (*)(void**)>(dlsym(driver_, "cuCtxGetCurrent"))) current(&context_);
  }

  // Runs on another thread. It takes the same context, and keeps calls of this thread from breaking the capture of a
  // graph on another thread.
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
  void* driver_ = dlopen("libcuda.so.1", RTLD_LAZY);  // CUDA does not expect that the driver is closed.
  void* context_ = nullptr;
};

}  // namespace aiocomms
