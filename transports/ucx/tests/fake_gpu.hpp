// The calls of CUDA's runtime and NCCL that the launcher makes, on the memory of one process. A thread serves the
// streams, which are queues. A test stops a call at its beginning, makes one fail, or limits the tasks of a stream.
// Device 0 has the streams that tests make. Device 1 has only its default stream.
#pragma once

#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "launcher/gpu_api.hpp"

namespace aiocomms {

struct FakeStream {
  std::deque<std::function<bool()>> tasks;  // each is called until it returns true
  std::size_t most = 1000;                  // with more tasks, NCCL's calls wait
};

struct FakeEvent {
  std::shared_ptr<bool> fired;  // of its last record
  int device;
};

// The common state of a communicator's ranks: the calls that wait for each other, by number.
struct FakeMeeting {
  struct Part {
    const float* send;
    float* recv;
    std::size_t count;
    std::shared_ptr<bool> done;
  };
  std::size_t ranks;
  std::map<std::uint64_t, std::vector<Part>> calls;
};

struct FakeComm {
  std::shared_ptr<FakeMeeting> meeting;
  std::uint64_t calls = 0;
  bool aborted = false;
};

class FakeGpu {
 public:
  FakeGpu() : thread_([this] { run(); }) {}
  ~FakeGpu() {
    {
      const Lock lock(mutex_);
      ended_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }

  // --------------------------------------------------------------------------------------------------------- for tests
  FakeStream* stream() {
    const Lock lock(mutex_);
    return streams_.emplace_back(std::make_unique<FakeStream>()).get();
  }
  // Makes the ranks of a new communicator.
  std::vector<FakeComm*> comms(std::size_t ranks) {
    const Lock lock(mutex_);
    auto meeting = std::make_shared<FakeMeeting>(FakeMeeting{ranks, {}});
    std::vector<FakeComm*> made;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      made.push_back(comms_.emplace_back(std::make_unique<FakeComm>(FakeComm{meeting})).get());
    }
    return made;
  }
  void abort(FakeComm* comm) {
    const Lock lock(mutex_);
    comm->aborted = true;
    changed_.notify_all();
  }
  // A kernel that runs until the gate is opened.
  std::shared_ptr<bool> gate(FakeStream* stream) {
    const Lock lock(mutex_);
    auto open = std::make_shared<bool>(false);
    push(stream, [open] { return *open; });
    return open;
  }
  void open(const std::shared_ptr<bool>& gate) {
    const Lock lock(mutex_);
    *gate = true;
    changed_.notify_all();
  }
  // The next call of a function stops at its beginning, until let_go().
  void stop(const std::string& function) {
    const Lock lock(mutex_);
    stopped_.insert(function);
  }
  void wait_for(const std::string& function) {
    Lock lock(mutex_);
    changed_.wait(lock, [&] { return reached_.contains(function); });
  }
  void let_go(const std::string& function) {
    const Lock lock(mutex_);
    stopped_.erase(function);
    reached_.erase(function);
    changed_.notify_all();
  }
  void fail(const std::string& function, int code) {
    const Lock lock(mutex_);
    failing_[function] = code;
  }
  std::vector<std::string> called() {
    const Lock lock(mutex_);
    return std::exchange(called_, {});
  }
  // The number of tasks of a device's default stream, which CUDA's calls name by a null pointer.
  std::size_t waiting(int device) {
    const Lock lock(mutex_);
    return defaults_[device]->tasks.size();
  }
  int count(const std::string& function) {
    const Lock lock(mutex_);
    return counts_[function];
  }
  // The number of existing events.
  std::size_t events() {
    const Lock lock(mutex_);
    return events_.size();
  }
  bool misused() {
    const Lock lock(mutex_);
    return misused_;
  }

  static GpuApi api();

 private:
  friend struct FakeCalls;
  using Lock = std::unique_lock<std::mutex>;

  FakeStream* at(GpuStream stream) {
    return stream == nullptr ? defaults_[current_device] : static_cast<FakeStream*>(stream);
  }
  int device_of(FakeStream* stream) const { return stream == defaults_[1] ? 1 : 0; }
  void push(FakeStream* stream, std::function<bool()> task) {
    stream->tasks.push_back(std::move(task));
    changed_.notify_all();
  }
  // Every call begins here. Returns its failure.
  int enter(Lock& lock, const std::string& function) {
    ++counts_[function];
    if (stopped_.contains(function)) {
      reached_.insert(function);
      changed_.notify_all();
      changed_.wait(lock, [&] { return !stopped_.contains(function); });
    }
    const auto found = failing_.find(function);
    return found == failing_.end() ? 0 : found->second;
  }
  int call_nccl(const std::string& function, const void* send, void* recv, std::size_t count, NcclComm comm_,
                GpuStream stream_) {
    Lock lock(mutex_);
    auto* comm = static_cast<FakeComm*>(comm_);
    auto* stream = static_cast<FakeStream*>(stream_);
    misused_ = misused_ || comm->aborted;
    called_.push_back(function);
    if (const int code = enter(lock, function)) return code;
    changed_.wait(lock, [&] { return stream->tasks.size() < stream->most || comm->aborted; });
    const auto done = std::make_shared<bool>(false);
    const FakeMeeting::Part part{static_cast<const float*>(send), static_cast<float*>(recv), count, done};
    push(stream, [comm, part, number = comm->calls++, arrived = false]() mutable {
      if (!arrived && !comm->aborted) arrive(*comm->meeting, number, part);
      arrived = true;
      return *part.done || comm->aborted;
    });
    return 0;
  }
  static void arrive(FakeMeeting& meeting, std::uint64_t number, const FakeMeeting::Part& part) {
    if (part.send == nullptr || part.recv == nullptr) {  // A message carries no data here.
      *part.done = true;
      return;
    }
    auto& parts = meeting.calls[number];
    parts.push_back(part);
    if (parts.size() < meeting.ranks) return;
    std::vector<float> sum(part.count);
    for (const auto& each : parts) {
      for (std::size_t i = 0; i < each.count; ++i) sum[i] += each.send[i];
    }
    for (const auto& each : parts) {
      std::memcpy(each.recv, sum.data(), each.count * sizeof(float));
      *each.done = true;
    }
    meeting.calls.erase(number);
  }
  void run() {
    Lock lock(mutex_);
    while (!ended_) {
      bool moved = false;
      for (const auto& stream : streams_) {
        while (!stream->tasks.empty() && stream->tasks.front()()) {
          stream->tasks.pop_front();
          moved = true;
        }
      }
      if (moved) {
        changed_.notify_all();
      } else {
        changed_.wait(lock);
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  static constexpr int kInvalidHandle = 400;  // cudaErrorInvalidResourceHandle
  static inline thread_local int current_device = 0;
  std::vector<std::unique_ptr<FakeStream>> streams_;
  FakeStream* const defaults_[2] = {stream(), stream()};
  std::vector<std::unique_ptr<FakeComm>> comms_;
  std::set<FakeEvent*> events_;
  std::set<std::string> stopped_, reached_;
  std::map<std::string, int> failing_, counts_;
  std::vector<std::string> called_;
  bool misused_ = false;
  bool ended_ = false;
  std::thread thread_;
};

inline FakeGpu* gpu = nullptr;  // the test's GPU

// The functions that the launcher calls.
struct FakeCalls {
  using Lock = FakeGpu::Lock;

  static int get_device(int* device) {
    *device = FakeGpu::current_device;
    return 0;
  }
  static int set_device(int device) {
    FakeGpu::current_device = device;
    return 0;
  }
  static int event_create(GpuEvent* made, unsigned flags) {
    Lock lock(gpu->mutex_);
    if (const int code = gpu->enter(lock, "create")) return code;
    if (flags != GpuApi::kSleepsOn) gpu->misused_ = true;
    auto* event = new FakeEvent{std::make_shared<bool>(true), FakeGpu::current_device};
    gpu->events_.insert(event);
    *made = event;
    return 0;
  }
  static int event_destroy(GpuEvent event) {
    Lock lock(gpu->mutex_);
    if (gpu->events_.erase(static_cast<FakeEvent*>(event)) != 1) gpu->misused_ = true;
    delete static_cast<FakeEvent*>(event);
    return gpu->enter(lock, "destroy");
  }
  static int event_record(GpuEvent event, GpuStream stream) {
    Lock lock(gpu->mutex_);
    if (const int code = gpu->enter(lock, "record")) return code;
    auto* it = static_cast<FakeEvent*>(event);
    FakeStream* const on = gpu->at(stream);
    if (it->device != gpu->device_of(on)) return FakeGpu::kInvalidHandle;
    if (!*it->fired) gpu->misused_ = true;  // The last record is lost.
    it->fired = std::make_shared<bool>(false);
    gpu->push(on, [fired = it->fired] { return *fired = true; });
    return 0;
  }
  static int event_query(GpuEvent event) {
    Lock lock(gpu->mutex_);
    if (const int code = gpu->enter(lock, "query")) return code;
    return *static_cast<FakeEvent*>(event)->fired ? 0 : GpuApi::kNotReady;
  }
  static int event_synchronize(GpuEvent event) {
    Lock lock(gpu->mutex_);
    const auto fired = static_cast<FakeEvent*>(event)->fired;
    if (const int code = gpu->enter(lock, "synchronize")) return code;
    gpu->changed_.wait(lock, [&] { return *fired; });
    return 0;
  }
  static int stream_wait_event(GpuStream stream, GpuEvent event, unsigned) {
    Lock lock(gpu->mutex_);
    if (const int code = gpu->enter(lock, "wait")) return code;
    gpu->push(gpu->at(stream), [fired = static_cast<FakeEvent*>(event)->fired] { return *fired; });
    return 0;
  }
  static int memcpy_async(void* to, const void* from, std::size_t bytes, int, GpuStream stream) {
    Lock lock(gpu->mutex_);
    gpu->called_.push_back("copy");
    if (const int code = gpu->enter(lock, "copy")) return code;
    gpu->push(static_cast<FakeStream*>(stream), [=] { return std::memcpy(to, from, bytes) != nullptr; });
    return 0;
  }
  static int group(const char* function) {
    Lock lock(gpu->mutex_);
    gpu->called_.push_back(function);
    return gpu->enter(lock, function);
  }
  static int all_reduce(const void* send, void* recv, std::size_t count, int, int, NcclComm comm, GpuStream stream) {
    return gpu->call_nccl("all_reduce", send, recv, count, comm, stream);
  }
  // The other calls carry no data here. Tests that call the launcher from Python check their arguments.
  static int rooted(const void* send, void* recv, std::size_t count, int, int, int, NcclComm comm, GpuStream stream) {
    return gpu->call_nccl("reduce", send, recv, count, comm, stream);
  }
  static int moving(const void* send, void* recv, std::size_t count, int, int, NcclComm comm, GpuStream stream) {
    return gpu->call_nccl("move", send, recv, count, comm, stream);
  }
  static int gather(const void* send, void* recv, std::size_t count, int, NcclComm comm, GpuStream stream) {
    return gpu->call_nccl("all_gather", send, recv, count, comm, stream);
  }
  static int send(const void* send, std::size_t count, int, int, NcclComm comm, GpuStream stream) {
    return gpu->call_nccl("send", send, nullptr, count, comm, stream);
  }
  static int recv(void* recv, std::size_t count, int, int, NcclComm comm, GpuStream stream) {
    return gpu->call_nccl("recv", nullptr, recv, count, comm, stream);
  }
};

inline GpuApi FakeGpu::api() {
  GpuApi api;
  api.get_device = FakeCalls::get_device;
  api.set_device = FakeCalls::set_device;
  api.exchange_capture_mode = [](int*) { return 0; };
  api.error_string = [](int) { return "the fake's error"; };
  api.last_error = [] { return 0; };
  api.event_create = FakeCalls::event_create;
  api.event_destroy = FakeCalls::event_destroy;
  api.event_record = FakeCalls::event_record;
  api.event_query = FakeCalls::event_query;
  api.event_synchronize = FakeCalls::event_synchronize;
  api.stream_wait_event = FakeCalls::stream_wait_event;
  api.memcpy_async = FakeCalls::memcpy_async;
  api.group_start = [] { return FakeCalls::group("start"); };
  api.group_end = [] { return FakeCalls::group("end"); };
  api.all_reduce = FakeCalls::all_reduce;
  api.reduce = FakeCalls::rooted;
  api.broadcast = FakeCalls::moving;
  api.all_gather = FakeCalls::gather;
  api.reduce_scatter = FakeCalls::moving;
  api.send = FakeCalls::send;
  api.recv = FakeCalls::recv;
  return api;
}

}  // namespace aiocomms
