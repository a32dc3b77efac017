// What the files of the pretended CUDA runtime share: its settings, its log, and where memory lies.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>

struct CUstream_st {
  int device;
  int number;
};

struct CUevent_st {
  int number;
  bool timed;
  double seconds;  // when it was recorded
};

namespace pretended {

// Must agree with `Kind` in tests/pretended_cuda/log.py.
enum class Kind : int32_t {
  launch = 1,   // a kernel; detail: its address
  copy,         // first: target, second: source; detail: 1 where the target is pageable, plus 2 where the source is
  set,          // first: address
  record,       // first: event
  wait,         // a stream waits; first: event
  sync_stream,  // the host waits for a stream
  sync_event,   // the host waits for an event, or has seen that it has passed; first: event
  sync_device,  // the host waits for all streams of a device
};

struct Entry {
  int32_t kind, thread, device, stream;
  int64_t first, second, bytes, detail;
};

// Where an address lies.
enum class Place { pageable, pinned, device };

inline int64_t setting(const char* name, int64_t standard) {
  const char* given = getenv(name);
  return given ? atoll(given) : standard;
}

inline int device_count() { return static_cast<int>(setting("PRETENDED_CUDA_DEVICES", 1)); }
inline size_t device_bytes() { return static_cast<size_t>(setting("PRETENDED_CUDA_BYTES", 85017493504)); }

int current_device();
int device_of(cudaStream_t stream);
int number_of(cudaStream_t stream);  // the null stream of device d is -1 - d

void note(Kind kind, cudaStream_t stream, int64_t first = 0, int64_t second = 0, int64_t bytes = 0, int64_t detail = 0);

cudaError_t failed(cudaError_t error);  // remembers it for cudaGetLastError
bool take(int64_t bytes, int device);   // books memory of a device; negative to give it back; false where it is full
void* reserve(size_t bytes, int device);  // addresses of a device, without memory of its own
size_t free_bytes(int device);
Place place_of(const void* address, int* device = nullptr);

}  // namespace pretended
