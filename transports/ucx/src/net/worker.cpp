#include "net/worker.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "net/fence.hpp"

namespace aiocomms {
namespace {

constexpr unsigned kMessage = 1;                   // the id of the engine's one active message
constexpr std::size_t kLongestTold = 64;           // bytes
constexpr unsigned kUcxMajor = 1, kUcxMinor = 18;  // the oldest UCX with this interface

void check(const char* call, ucs_status_t status) {
  if (status != UCS_OK) throw UcxError(call, status);
}

void on_done(void* request, ucs_status_t status, void* pending) {
  ucp_request_free(request);
  if (pending) static_cast<Pending*>(pending)->finished(status);
}

void on_fetched(void* request, ucs_status_t status, std::size_t, void* pending) { on_done(request, status, pending); }

ucp_request_param_t request_param(Pending* pending) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.send = on_done;
  param.user_data = pending;
  return param;
}

ucs_status_t outcome(ucs_status_ptr_t request) {
  if (request == nullptr) return UCS_OK;
  return UCS_PTR_IS_ERR(request) ? UCS_PTR_STATUS(request) : UCS_INPROGRESS;
}

// A datatype whose unpacking keeps the beginning and drops the rest. UCX itself refuses a message that is longer than
// its buffer.
ucp_generic_dt_ops_t beginning_ops() {
  ucp_generic_dt_ops_t ops{};
  ops.start_pack = [](void*, const void*, std::size_t) -> void* { return nullptr; };
  ops.start_unpack = [](void*, void* buffer, std::size_t) -> void* { return buffer; };
  ops.packed_size = [](void* state) { return static_cast<Beginning*>(state)->bytes; };
  ops.pack = [](void*, std::size_t, void*, std::size_t) -> std::size_t { return 0; };
  ops.unpack = [](void* state, std::size_t offset, const void* from, std::size_t bytes) {
    auto [data, room, all] = *static_cast<Beginning*>(state);
    if (offset < room) std::memcpy(static_cast<std::byte*>(data) + offset, from, std::min(bytes, room - offset));
    return UCS_OK;
  };
  ops.finish = [](void*) {};
  return ops;
}

bool reaches(ucp_context_h context, ucs_memory_type_t memory) {
  ucp_context_attr_t attr{};
  attr.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
  check("ucp_context_query", ucp_context_query(context, &attr));
  return (attr.memory_types >> memory & 1) != 0;
}

}  // namespace

UcxError::UcxError(const char* call, ucs_status_t status)
    : std::runtime_error(std::string(call) + ": " + ucs_status_string(status)) {}

Worker::Worker(const std::vector<std::pair<std::string, std::string>>& options, std::optional<ucs_memory_type_t> device,
               Arrived arrived, Misled misled)
    : device_(device), arrived_(std::move(arrived)), misled_(std::move(misled)) {
  ucp_config_t* config = nullptr;
  check("ucp_config_read", ucp_config_read(nullptr, nullptr, &config));
  for (const auto& [name, value] : options) {
    if (std::getenv(("UCX_" + name).c_str()) == nullptr) {
      ucs_status_t status = ucp_config_modify(config, name.c_str(), value.c_str());
      if (status != UCS_OK) {
        ucp_config_release(config);
        throw UcxError(("UCX setting " + name + "=" + value).c_str(), status);
      }
    }
  }
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_REQUEST_SIZE | UCP_PARAM_FIELD_REQUEST_INIT;
  params.request_size = sizeof(Counted);
  params.request_init = [](void* request) { *static_cast<Counted*>(request) = {}; };
  params.features = UCP_FEATURE_AM | UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP;
  ucs_status_t status = ucp_init_version(kUcxMajor, kUcxMinor, &params, config, &context_);
  ucp_config_release(config);
  check("ucp_init", status);
  if (device_ && !reaches(context_, *device_)) {
    ucp_cleanup(context_);
    throw UcxError(ucs_memory_type_names[*device_], UCS_ERR_UNSUPPORTED);
  }

  ucp_worker_params_t wanted{};
  // A worker may be destroyed with outstanding requests after the death of a peer. UCX would call those requests a
  // leak.
  wanted.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_FLAGS;
  wanted.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  wanted.flags = UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK;
  status = ucp_worker_create(context_, &wanted, &worker_);
  if (status != UCS_OK) {
    ucp_cleanup(context_);
    throw UcxError("ucp_worker_create", status);
  }
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kMessage;
  handler.cb = on_message;
  handler.arg = this;
  status = ucp_worker_set_am_recv_handler(worker_, &handler);
  ucp_generic_dt_ops_t ops = beginning_ops();
  if (status == UCS_OK) status = ucp_dt_create_generic(&ops, nullptr, &beginnings_);
  if (status != UCS_OK) {
    ucp_worker_destroy(worker_);
    ucp_cleanup(context_);
    throw UcxError("ucp_worker_set_am_recv_handler", status);
  }
}

Worker::~Worker() {
  ucp_worker_destroy(worker_);
  ucp_dt_destroy(beginnings_);
  ucp_cleanup(context_);
}

std::string Worker::address() const {
  ucp_worker_attr_t attr{};
  attr.field_mask = UCP_WORKER_ATTR_FIELD_ADDRESS;
  check("ucp_worker_query", ucp_worker_query(worker_, &attr));
  std::string address(reinterpret_cast<const char*>(attr.address), attr.address_length);
  ucp_worker_release_address(worker_, attr.address);
  return address;
}

int Worker::event_fd() const {
  int fd = -1;
  check("ucp_worker_get_efd", ucp_worker_get_efd(worker_, &fd));
  return fd;
}

void Worker::make_room(std::size_t peers) {
  while (peers_.size() < peers) peers_.emplace_back();
}

void Worker::introduce(int number, std::string address, bool watched, Cookies cookies, std::uint32_t name) {
  Peer& peer = peers_[number];
  peer.address = std::move(address);
  peer.watched = watched;
  peer.cookies = cookies;
  peer.name = name;
  peer.heard = true;
  peer.failed = false;
  peer.why = UCS_ERR_CONNECTION_RESET;
}

void Worker::refuse(int peer) {
  if (std::exchange(peers_[peer].heard, false)) misled_(peer);
}

void Worker::write_off(int number) {
  Peer& peer = peers_[number];
  if (!std::exchange(peer.written_off, true)) unfinished_ -= peer.unfinished;
}

void Worker::forget(int number, bool flush) {
  Peer& peer = peers_[number];
  peer.heard = false;
  peer.forgotten = true;
  peer.address = {};
  if (peer.endpoint != nullptr && (flush || peer.watched)) {
    ucp_request_param_t param = request_param(&peer);
    if (peer.watched && (peer.failed || !flush)) {
      param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
      param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    }
    peer.closing = outcome(ucp_ep_close_nbx(std::exchange(peer.endpoint, nullptr), &param)) == UCS_INPROGRESS;
  }
  peer.failed = true;
}

ucp_ep_h Worker::endpoint(Peer& peer) {
  if (peer.endpoint == nullptr && !peer.failed) {
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
    params.address = reinterpret_cast<const ucp_address_t*>(peer.address.data());
    params.err_mode = UCP_ERR_HANDLING_MODE_NONE;
    if (peer.watched) {
      params.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLER;
      params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
      // The control connection reports the loss of the peer, with its name. This handler only keeps the error from
      // being fatal.
      params.err_handler.cb = [](void* arg, ucp_ep_h, ucs_status_t status) {
        auto& lost = *static_cast<Peer*>(arg);
        lost.failed = true;
        lost.why = status;
      };
      params.err_handler.arg = &peer;
    }
    const ucs_status_t status = ucp_ep_create(worker_, &params, &peer.endpoint);
    if (status != UCS_OK) {
      peer.failed = true;
      peer.why = status;
    }
  }
  return peer.failed ? nullptr : peer.endpoint;
}

// Sets the parameters of each call on memory: its waiter, and the type of the memory.
ucp_request_param_t Worker::param(Memory memory, Pending* pending) const {
  ucp_request_param_t param = request_param(pending);
  if (memory == Memory::kUsers && device_) {
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMORY_TYPE;
    param.memory_type = *device_;
  }
  return param;
}

// Marks a call that counts as unfinished until its callback. Its waiter is then stored in the request.
ucp_request_param_t Worker::counted(ucp_request_param_t param) {
  param.cb.send = on_counted;
  param.user_data = this;
  return param;
}

// Counts a call that has returned.
ucs_status_t Worker::count(ucs_status_ptr_t request, Pending* pending, Peer* peer) {
  const ucs_status_t status = outcome(request);
  if (status == UCS_INPROGRESS) {
    *static_cast<Counted*>(request) = {pending, peer};  // No callback comes before the next progress().
    if (peer) ++peer->unfinished;
    if (!peer || !peer->written_off) ++unfinished_;
  }
  return status;
}

void Worker::on_counted(void* request, ucs_status_t status, void* worker) {
  const auto [pending, peer] = *static_cast<Counted*>(request);
  if (peer) --peer->unfinished;
  if (!peer || !peer->written_off) --static_cast<Worker*>(worker)->unfinished_;
  on_done(request, status, pending);
}

void Worker::on_counted_fetch(void* request, ucs_status_t status, std::size_t, void* worker) {
  on_counted(request, status, worker);
}

void Worker::sign(Header& header, const Peer& to) {
  header.order = to.sent;
  header.peer = to.name;
  header.cookie = to.cookies.ours;
}

ucs_status_t Worker::send(int peer, Header header, const void* data, Memory memory, Pending* pending) {
  sign(header, peers_[peer]);
  return send(peers_[peer], &header, sizeof header, data, header.bytes, memory, pending);
}

ucs_status_t Worker::tell(int peer, Header header, const void* what, std::size_t bytes, Pending* pending) {
  sign(header, peers_[peer]);
  std::array<std::byte, sizeof header + kLongestTold> both;
  std::memcpy(both.data(), &header, sizeof header);
  if (bytes) std::memcpy(both.data() + sizeof header, what, bytes);
  return send(peers_[peer], both.data(), sizeof header + bytes, nullptr, 0, Memory::kOwn, pending);
}

ucs_status_t Worker::send(Peer& peer, const void* header, std::size_t header_bytes, const void* data, std::size_t bytes,
                          Memory memory, Pending* pending) {
  ucp_ep_h to = endpoint(peer);
  if (to == nullptr) return peer.why;
  ++peer.sent;
  // The receiver may then overwrite memory that this rank has read, in shared memory or in a peer's tensor. It may also
  // read memory that this rank has written. UCX has barriers for the bytes that it carries, and promises nothing for
  // other bytes.
  fence(std::memory_order_release);
  ucp_request_param_t param = counted(this->param(memory, nullptr));
  param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_COPY_HEADER;
  // With rendezvous the receiver gets a descriptor, and only UCX touches the memory at both ends.
  if (memory == Memory::kUsers && device_ && bytes) param.flags |= UCP_AM_SEND_FLAG_RNDV;
  if (bytes == 0) param.flags |= UCP_AM_SEND_FLAG_EAGER;  // There is nothing to fetch, at any value of UCX_RNDV_THRESH.
  return count(ucp_am_send_nbx(to, kMessage, header, header_bytes, data, bytes, &param), pending, &peer);
}

ucs_status_t Worker::on_message(void* arg, const void* raw, std::size_t header_bytes, void* data, std::size_t bytes,
                                const ucp_am_recv_param_t* param) {
  fence(std::memory_order_acquire);  // see send()
  const bool large = param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV;
  const ucs_status_t status = static_cast<Worker*>(arg)->receive(raw, header_bytes, data, bytes, large);
  // UCX reuses the memory of this message for the next one. Its own barrier orders stores only.
  fence(std::memory_order_acquire);
  return status;
}

ucs_status_t Worker::receive(const void* raw, std::size_t header_bytes, void* data, std::size_t bytes, bool large) {
  Header header;
  if (header_bytes < sizeof header) return UCS_OK;  // a message from a foreign process
  std::memcpy(&header, raw, sizeof header);
  if (header.peer >= peers_.size()) return UCS_OK;
  const int peer = static_cast<int>(header.peer);
  if (!peers_[peer].heard || header.cookie != peers_[peer].cookies.theirs) return UCS_OK;
  const std::size_t told = header_bytes - sizeof header;
  const std::size_t wanted = header.dtype & kOffered ? sizeof(Offer) : header.bytes;
  const bool offer_told = told || !(header.dtype & kOffered);
  if (told + bytes != wanted || (told && bytes) || !offer_told) {
    refuse(peer);
    return UCS_OK;
  }
  if (told) {
    arrived_(peer, header, static_cast<const std::byte*>(raw) + sizeof header, nullptr);
    return UCS_OK;
  }
  arriving_ = large ? data : nullptr;
  arrived_(peer, header, large ? nullptr : data, arriving_);
  return std::exchange(arriving_, nullptr) ? UCS_INPROGRESS : UCS_OK;
}

// A descriptor is not complete until the callback that received it returns. The callback's return value then releases
// it.
void Worker::release(void* descriptor) {
  if (descriptor == arriving_) {
    arriving_ = nullptr;
  } else {
    ucp_am_data_release(worker_, descriptor);
  }
}

ucs_status_t Worker::fetch(void* descriptor, void* data, std::size_t bytes, Memory memory, Pending* pending) {
  return fetch(descriptor, data, bytes, param(memory, pending), pending);
}

ucs_status_t Worker::fetch_beginning(void* descriptor, Beginning* beginning, Pending* pending) {
  ucp_request_param_t param = request_param(pending);
  param.op_attr_mask |= UCP_OP_ATTR_FIELD_DATATYPE;
  param.datatype = beginnings_;
  return fetch(descriptor, beginning, 1, param, pending);
}

ucs_status_t Worker::fetch(void* descriptor, void* data, std::size_t count, ucp_request_param_t param,
                           Pending* pending) {
  if (device_) param = counted(param);
  param.cb.recv_am = device_ ? on_counted_fetch : on_fetched;
  ucs_status_ptr_t request = ucp_am_recv_data_nbx(worker_, descriptor, data, count, &param);
  return device_ ? this->count(request, pending, nullptr) : outcome(request);
}

ucs_status_t Worker::put(int peer, ucp_rkey_h rkey, std::uint64_t address, const void* data, std::size_t bytes,
                         Pending* pending) {
  ucp_ep_h to = endpoint(peer);
  if (to == nullptr) return peers_[peer].why;
  ucp_request_param_t param = this->param(Memory::kUsers, pending);
  if (device_) param = counted(param);
  ucs_status_ptr_t request = ucp_put_nbx(to, data, bytes, address, rkey, &param);
  return device_ ? count(request, pending, &peers_[peer]) : outcome(request);
}

ucs_status_t Worker::get(int peer, ucp_rkey_h rkey, std::uint64_t address, void* data, std::size_t bytes,
                         Pending* pending) {
  ucp_ep_h from = endpoint(peer);
  if (from == nullptr) return peers_[peer].why;
  ucp_request_param_t param = this->param(Memory::kUsers, pending);
  if (device_) param = counted(param);
  ucs_status_ptr_t request = ucp_get_nbx(from, data, bytes, address, rkey, &param);
  return device_ ? count(request, pending, &peers_[peer]) : outcome(request);
}

ucs_status_t Worker::flush(int number, Pending* pending) {
  if (peers_[number].endpoint == nullptr) return UCS_OK;
  if (peers_[number].failed) return peers_[number].why;
  ucp_request_param_t param = request_param(pending);
  return outcome(ucp_ep_flush_nbx(peers_[number].endpoint, &param));
}

ucp_mem_h Worker::map(void* data, std::size_t bytes) {
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
  params.address = data;
  params.length = bytes;
  if (device_) {
    params.field_mask |= UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
    params.memory_type = *device_;
  }
  ucp_mem_h memory = nullptr;
  check("ucp_mem_map", ucp_mem_map(context_, &params, &memory));
  return memory;
}

std::string Worker::pack(ucp_mem_h memory) {
  void* buffer = nullptr;
  std::size_t size = 0;
  check("ucp_rkey_pack", ucp_rkey_pack(context_, memory, &buffer, &size));
  std::string packed(static_cast<const char*>(buffer), size);
  ucp_rkey_buffer_release(buffer);
  return packed;
}

ucp_rkey_h Worker::unpack(int peer, const std::string& packed) {
  ucp_ep_h to = endpoint(peer);
  if (to == nullptr) throw UcxError("ucp_ep_create", peers_[peer].why);
  ucp_rkey_h rkey = nullptr;
  check("ucp_ep_rkey_unpack", ucp_ep_rkey_unpack(to, packed.data(), &rkey));
  return rkey;
}

void Worker::disconnect(const std::function<bool()>& patience) {
  std::vector<int> closed;
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
    if (peers_[peer].forgotten) continue;
    forget(peer, true);
    closed.push_back(peer);
  }
  for (int peer : closed) {
    while (closing(peer) && patience()) progress();
  }
}

}  // namespace aiocomms
