// The log: what the host issued, in order, with thread, device, stream and addresses. Python reads it through ctypes.
#include <atomic>
#include <cstring>
#include <mutex>
#include <vector>

#include "pretended.h"

namespace {

std::mutex mutex;
std::vector<pretended::Entry> entries;
std::atomic<bool> logging{false};
std::atomic<int> threads{0};

int this_thread() {
  thread_local const int number = threads++;
  return number;
}

void append(int kind, int device, int stream, int64_t first, int64_t second, int64_t bytes, int64_t detail) {
  if (!logging) return;
  std::lock_guard<std::mutex> guard(mutex);
  entries.push_back({kind, this_thread(), device, stream, first, second, bytes, detail});
}

}  // namespace

void pretended::note(Kind kind, cudaStream_t stream, int64_t first, int64_t second, int64_t bytes, int64_t detail) {
  append(static_cast<int>(kind), device_of(stream), number_of(stream), first, second, bytes, detail);
}

extern "C" {

void pretended_log(int on) { logging = on; }

int64_t pretended_count() {
  std::lock_guard<std::mutex> guard(mutex);
  return static_cast<int64_t>(entries.size());
}

// Moves the entries to an array of `pretended_count()` entries.
void pretended_take(pretended::Entry* target) {
  std::lock_guard<std::mutex> guard(mutex);
  memcpy(target, entries.data(), entries.size() * sizeof(pretended::Entry));
  entries.clear();
}

// An entry of the caller's own, of a kind that the runtime does not use; `stream` as torch hands it out.
void pretended_mark(int kind, int64_t stream, int64_t address, int64_t bytes, int64_t detail) {
  auto* on = reinterpret_cast<cudaStream_t>(stream);
  append(kind, pretended::device_of(on), pretended::number_of(on), address, 0, bytes, detail);
}
}
