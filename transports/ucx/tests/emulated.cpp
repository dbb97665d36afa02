// System calls that qemu-user lacks, for programs whose engines are all in one process.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

namespace {

struct Mapping {
  std::uintptr_t begin, end;
  int fd;
  off_t offset;
};

std::mutex mutex;
std::vector<Mapping>& mappings() {
  static std::vector<Mapping> all;
  return all;
}

// Extends a file to the end of its last page.
//
// If a file ends within a page, a kernel maps the whole page, and UCX uses it. UCX rounds the length of its shared
// memory up to pages, but not the length of the file (`uct_posix_mem_alloc`). qemu's larger pages end where the
// machine's page does.
void end_with_a_page(int fd, off_t end) {
  struct stat it;
  if (fstat(fd, &it) != 0 || !S_ISREG(it.st_mode) || it.st_size >= end) return;
  const auto page = static_cast<off_t>(sysconf(_SC_PAGESIZE));
  const off_t whole = (it.st_size + page - 1) / page * page;
  if (ftruncate(fd, std::min(whole, end)) != 0) std::abort();
}

}  // namespace

// qemu-user lacks this system call.
extern "C" ssize_t process_vm_readv(pid_t pid, const iovec* here, unsigned long, const iovec* there, unsigned long,
                                    unsigned long) {
  if (pid != getpid() || there->iov_base == nullptr) {
    errno = pid == getpid() ? EFAULT : ENOSYS;
    return -1;
  }
  std::memcpy(here->iov_base, there->iov_base, here->iov_len);
  return static_cast<ssize_t>(here->iov_len);
}

// qemu-user ignores MADV_REMOVE, so the pages would stay. So this records the file of each mapping.
extern "C" void* mmap(void* where, std::size_t bytes, int protection, int flags, int fd, off_t offset) noexcept {
  const bool shared = fd >= 0 && (flags & MAP_SHARED) != 0;
  if (shared && (protection & PROT_WRITE) != 0) end_with_a_page(fd, offset + static_cast<off_t>(bytes));
  const long got = syscall(SYS_mmap, where, bytes, protection, flags, fd, offset);
  if (got == -1) return MAP_FAILED;
  if (shared) {
    const auto begin = static_cast<std::uintptr_t>(got);
    const std::lock_guard lock(mutex);
    mappings().push_back({begin, begin + bytes, dup(fd), offset});
  }
  return reinterpret_cast<void*>(got);
}

extern "C" int munmap(void* where, std::size_t bytes) noexcept {
  const auto begin = reinterpret_cast<std::uintptr_t>(where);
  {
    const std::lock_guard lock(mutex);
    std::erase_if(mappings(), [&](const Mapping& it) { return it.begin == begin && close(it.fd) == 0; });
  }
  return static_cast<int>(syscall(SYS_munmap, where, bytes));
}

extern "C" int madvise(void* where, std::size_t bytes, int advice) noexcept {
  const auto begin = reinterpret_cast<std::uintptr_t>(where);
  const std::lock_guard lock(mutex);
  for (const Mapping& it : mappings()) {
    if (advice != MADV_REMOVE || begin < it.begin || begin >= it.end) continue;
    const auto offset = it.offset + static_cast<off_t>(begin - it.begin);
    return fallocate(it.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, static_cast<off_t>(bytes));
  }
  return static_cast<int>(syscall(SYS_madvise, where, bytes, advice));
}
