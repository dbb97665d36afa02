// Matches messages with receives by source, channel and tag, each in the order of arrival.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <unordered_map>
#include <utility>

#include "net/worker.hpp"

namespace aiocomms {

// A first-in first-out queue of nodes that carry their own links. A waiting receive costs only its node.
template <typename Node>
class Queue {
 public:
  bool empty() const { return head_ == nullptr; }
  Node* front() const { return head_; }
  void push(Node* node) {
    node->next = nullptr;
    (head_ ? tail_->next : head_) = node;
    tail_ = node;
  }
  Node* pop() {
    Node* node = head_;
    head_ = node->next;
    return node;
  }
  // Removes and returns the first node for which `is` holds, or null.
  template <typename Is>
  Node* take(Is is) {
    Node* before = nullptr;
    for (Node* node = head_; node; before = node, node = node->next) {
      if (!is(*node)) continue;
      (before ? before->next : head_) = node->next;
      if (tail_ == node) tail_ = before;
      return node;
    }
    return nullptr;
  }

 private:
  Node* head_ = nullptr;
  Node* tail_ = nullptr;
};

// A message that has arrived before its receive.
struct Message {
  Message* next = nullptr;
  Header header;
  std::unique_ptr<std::byte[]> payload;  // for a small message
  void* descriptor = nullptr;            // for a large message, whose payload is still at the sender
};

// The fields that a receive and its message share.
struct Key {
  std::int64_t tag;
  std::uint32_t source_and_channel;

  Key(std::uint16_t source, std::uint8_t channel, std::int64_t the_tag)
      : tag(the_tag), source_and_channel(static_cast<std::uint32_t>(source) << 8 | channel) {}
  explicit Key(const Header& header) : Key(header.source, header.channel, header.tag) {}
  int source() const { return static_cast<int>(source_and_channel >> 8); }
  int channel() const { return static_cast<int>(source_and_channel & 0xff); }
  bool operator==(const Key&) const = default;
};

struct KeyHash {
  std::size_t operator()(const Key& key) const {
    // Fibonacci hashing (Knuth, The Art of Computer Programming 3, 6.4).
    std::uint64_t mixed = static_cast<std::uint64_t>(key.tag) ^ (std::uint64_t{key.source_and_channel} << 40);
    return static_cast<std::size_t>((mixed * 0x9E3779B97F4A7C15u) >> 16);
  }
};

// Recv: a node type with `next`.
template <typename Recv>
class Mailbox {
 public:
  // Removes and returns the oldest receive for a message, or null.
  Recv* receive_for(const Header& header) { return pop(recvs_, Key(header)); }
  // Removes and returns the oldest message for a receive, or null.
  Message* message_for(const Key& key) { return pop(messages_, key); }
  // Returns the same message without removing it.
  const Message* look(const Key& key) const {
    auto found = messages_.find(key);
    return found == messages_.end() ? nullptr : found->second.front();
  }
  // Removes and returns a probe for a message, or null. A probe waits for a message and takes none.
  Recv* probe_for(const Header& header) { return probes_.empty() ? nullptr : pop(probes_, Key(header)); }

  void keep(const Key& key, Recv* recv) { recvs_[key].push(recv); }
  void keep_probe(const Key& key, Recv* probe) { probes_[key].push(probe); }
  void keep(Message* message) { messages_[Key(message->header)].push(message); }

  // Removes an unmatched receive or probe. Null: it is already matched.
  template <typename Is>
  Recv* withdraw(const Key& key, Is is) {
    Recv* recv = take(recvs_, key, is);
    return recv ? recv : take(probes_, key, is);
  }

  // Removes every receive and probe whose key satisfies `is`, and passes it to `each`. `each` adds nothing.
  template <typename Is, typename Each>
  void drain_receives(Is is, Each each) {
    drain(recvs_, is, [](const Recv&) { return true; }, each);
    drain(probes_, is, [](const Recv&) { return true; }, each);
  }
  // Removes the messages of such keys for which `is_one` holds.
  template <typename Is, typename IsOne, typename Each>
  void drain_messages(Is is, IsOne is_one, Each each) {
    drain(messages_, is, is_one, each);
  }

 private:
  template <typename Node>
  using Queues = std::unordered_map<Key, Queue<Node>, KeyHash>;

  template <typename Node>
  static Node* pop(Queues<Node>& queues, const Key& key) {
    auto found = queues.find(key);
    if (found == queues.end()) return nullptr;
    Node* node = found->second.pop();
    if (found->second.empty()) queues.erase(found);
    return node;
  }

  // Removes and returns the first node for which `is` holds, or null.
  template <typename Is>
  static Recv* take(Queues<Recv>& queues, const Key& key, Is is) {
    auto found = queues.find(key);
    if (found == queues.end()) return nullptr;
    Recv* recv = found->second.take(is);
    if (found->second.empty()) queues.erase(found);
    return recv;
  }

  template <typename Node, typename Is, typename IsOne, typename Each>
  static void drain(Queues<Node>& queues, Is is, IsOne is_one, Each each) {
    for (auto it = queues.begin(); it != queues.end();) {
      while (Node* node = is(it->first) ? it->second.take(is_one) : nullptr) each(node);
      it = it->second.empty() ? queues.erase(it) : std::next(it);
    }
  }

  Queues<Recv> recvs_;
  Queues<Recv> probes_;  // for keys without a message
  Queues<Message> messages_;
};

}  // namespace aiocomms
