// The entries of a flight recorder, which appends two for each op: Python objects, and times without an object for
// each. It is like collections.deque(maxlen=...), as far as a recorder uses that. All calls hold the interpreter's
// lock.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <stdexcept>
#include <utility>
#include <vector>

namespace aiocomms {

class Ring {
 public:
  explicit Ring(std::size_t capacity) : entries_(capacity) {
    if (capacity == 0) throw std::invalid_argument("a ring without room");
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() { clear(); }

  std::size_t size() const { return size_; }
  void append(PyObject* object) { put({Py_NewRef(object), 0}); }
  void append(double time) { put({nullptr, time}); }

  void clear() {
    for (std::size_t i = 0; i < entries_.size(); ++i) release(i);
    size_ = 0;
  }

  // Returns all entries, the oldest first. They are copied first, because making the list may run other Python code.
  nanobind::list copy() const {
    std::vector<std::pair<nanobind::object, double>> entries;
    entries.reserve(size_);
    for (std::size_t i = 0; i < size_; ++i) {
      const Entry& entry = entries_[(next_ + entries_.size() - size_ + i) % entries_.size()];
      entries.emplace_back(nanobind::borrow(entry.object), entry.time);
    }
    nanobind::list all;
    for (const auto& [object, time] : entries) {
      if (object) {
        all.append(object);
      } else {
        all.append(time);
      }
    }
    return all;
  }

  int traverse(visitproc visit, void* arg) const {
    for (const Entry& entry : entries_) Py_VISIT(entry.object);
    return 0;
  }

 private:
  struct Entry {
    PyObject* object = nullptr;
    double time = 0;
  };

  // The replaced object is released last. That may run Python code, which may append.
  void put(Entry entry) {
    PyObject* before = std::exchange(entries_[next_], entry).object;
    if (++next_ == entries_.size()) next_ = 0;
    if (size_ < entries_.size()) ++size_;
    Py_XDECREF(before);
  }
  void release(std::size_t i) { Py_XDECREF(std::exchange(entries_[i].object, nullptr)); }

  std::vector<Entry> entries_;
  std::size_t next_ = 0, size_ = 0;
};

}  // namespace aiocomms
