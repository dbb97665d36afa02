#!/bin/sh
# Run Python with the engine that was built with a sanitizer; fails if the sanitizer has anything to report.
#
#   run.sh address|thread PACKAGES PYTHON ARGUMENTS...      PACKAGES: where that engine's package is installed
set -eu
sanitizer=$1
packages=$(realpath "$2")
python=$3
shift 3
export PYTHONPATH="$(dirname "$(realpath "$0")"):$packages"
reports=$packages.reports
rm -rf "$reports"
mkdir "$reports"
cxx=${CXX:-g++}
# Where a container does not allow it, ThreadSanitizer may still find its way, or says that it does not.
fixed=$(setarch -R true 2>/dev/null && echo setarch -R || true)

# Without cma: uct_cma_iface_is_reachable_v2() has process_vm_readv() overwrite the very iovec that it was called with,
# by what lies there in another process, and the sanitizers' interceptors read that iovec afterwards. The engine's own
# copies by process_vm_readv() remain.
export UCX_TLS=^sysv,tcp,cma

sanitized() {
  if [ "$sanitizer" = address ]; then
    # Python leaks when it ends. Exceptions of C++ need libstdc++ to be there from the beginning.
    env LD_PRELOAD="$($cxx -print-file-name=libasan.so) $($cxx -print-file-name=libstdc++.so)" \
      ASAN_OPTIONS="detect_leaks=0 log_path=$reports/report" "$@"
  else
    # fixed: it does not find its way where addresses are random in more bits than it knows.
    # ignore_noninstrumented_modules: nothing but the engine is instrumented.
    # intercept_tls_get_addr: GCC 12's takes some memory for a header of an old glibc's, and ends the process.
    # UCX_MEM_...: UCX hooks madvise(), which glibc calls for a thread that ends, when ThreadSanitizer has forgotten it.
    $fixed env LD_PRELOAD="$($cxx -print-file-name=libtsan.so)" \
      TSAN_OPTIONS="ignore_noninstrumented_modules=1 intercept_tls_get_addr=0 log_path=$reports/report" \
      UCX_MEM_EVENTS=no UCX_MEM_MMAP_HOOK_MODE=none "$@"
  fi
}

sanitized "$python" -c "import aiocomms_ucx._engine as it; assert it.__file__.startswith('$packages/'), it.__file__"
status=0
sanitized "$python" "$@" || status=$?
for report in "$reports"/*; do
  if [ -e "$report" ]; then
    cat "$report"
    status=1
  fi
done
exit $status
