// Memory: that of a device is host memory, mapped where it is asked for. Copies happen at once, in the host's order.
#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "pretended.h"

using pretended::Kind;
using pretended::Place;

namespace {

constexpr size_t PAGE = size_t{2} << 20;  // blocks of devices are mapped in multiples of it
constexpr size_t SMALL = 4096;            // copies up to this happen where large ones do not

struct Block {
  size_t bytes;
  int device;
};

std::recursive_mutex mutex;
std::map<const char*, Block> blocks;         // of devices, by address
std::map<const char*, size_t> pinned;        // of the host
std::vector<int64_t> used(64, 0);            // bytes of each device

bool dry() {
  static const bool is = pretended::setting("PRETENDED_CUDA_DRY", 0);
  return is;
}

size_t mapped(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

void* map(size_t bytes) {
  void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return made == MAP_FAILED ? nullptr : made;
}

// The block of a map of blocks that has an address, or its end.
template <class Blocks, class Size>
auto block_at(const Blocks& all, const char* address, Size size) {
  auto after = all.upper_bound(address);
  if (after == all.begin()) return all.end();
  auto found = std::prev(after);
  return address < found->first + size(found->second) ? found : all.end();
}

cudaError_t allocate(void** pointer, size_t bytes, int device) {
  *pointer = nullptr;
  if (!pretended::take(static_cast<int64_t>(bytes), device)) return pretended::failed(cudaErrorMemoryAllocation);
  *pointer = pretended::reserve(bytes, device);
  return *pointer ? cudaSuccess : pretended::failed(cudaErrorMemoryAllocation);
}

void move(void* to, const void* from, size_t bytes) {
  if (!dry() || bytes <= SMALL) memmove(to, from, bytes);
}

void note_copy(cudaStream_t stream, const void* to, const void* from, size_t bytes) {
  int64_t pageable = (pretended::place_of(to) == Place::pageable ? 1 : 0) +
                     (pretended::place_of(from) == Place::pageable ? 2 : 0);
  pretended::note(Kind::copy, stream, reinterpret_cast<int64_t>(to), reinterpret_cast<int64_t>(from),
                  static_cast<int64_t>(bytes), pageable);
}

}  // namespace

bool pretended::take(int64_t bytes, int device) {
  std::lock_guard<std::recursive_mutex> guard(mutex);
  if (bytes > 0 && used[device] + bytes > static_cast<int64_t>(device_bytes())) return false;
  used[device] += bytes;
  return true;
}

void* pretended::reserve(size_t bytes, int device) {
  void* made = map(mapped(bytes));
  std::lock_guard<std::recursive_mutex> guard(mutex);
  if (made) blocks[static_cast<char*>(made)] = {bytes, device};
  return made;
}

size_t pretended::free_bytes(int device) {
  std::lock_guard<std::recursive_mutex> guard(mutex);
  return device_bytes() - static_cast<size_t>(used[device]);
}

Place pretended::place_of(const void* pointer, int* device) {
  auto* address = static_cast<const char*>(pointer);
  std::lock_guard<std::recursive_mutex> guard(mutex);
  auto block = block_at(blocks, address, [](const Block& b) { return b.bytes; });
  if (block != blocks.end()) {
    if (device) *device = block->second.device;
    return Place::device;
  }
  return block_at(pinned, address, [](size_t bytes) { return bytes; }) == pinned.end() ? Place::pageable : Place::pinned;
}

extern "C" {

int64_t pretended_pinned() {
  std::lock_guard<std::recursive_mutex> guard(mutex);
  int64_t sum = 0;
  for (auto& block : pinned) sum += static_cast<int64_t>(block.second);
  return sum;
}

cudaError_t cudaMalloc(void** pointer, size_t bytes) { return allocate(pointer, bytes, pretended::current_device()); }

cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t stream) {
  return allocate(pointer, bytes, pretended::device_of(stream));
}

cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  std::lock_guard<std::recursive_mutex> guard(mutex);
  auto found = blocks.find(static_cast<char*>(pointer));
  if (found == blocks.end()) return pretended::failed(cudaErrorInvalidValue);
  pretended::note(Kind::sync_device, nullptr);  // as the real one waits
  pretended::take(-static_cast<int64_t>(found->second.bytes), found->second.device);
  munmap(pointer, mapped(found->second.bytes));
  blocks.erase(found);
  return cudaSuccess;
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }

cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  *total = pretended::device_bytes();
  *available = pretended::free_bytes(pretended::current_device());
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  std::lock_guard<std::recursive_mutex> guard(mutex);
  pinned[static_cast<char*>(pointer)] = bytes;
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* pointer) {
  std::lock_guard<std::recursive_mutex> guard(mutex);
  pinned.erase(static_cast<char*>(pointer));
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  *pointer = map(bytes);
  return *pointer ? cudaHostRegister(*pointer, bytes, 0) : pretended::failed(cudaErrorMemoryAllocation);
}

cudaError_t cudaFreeHost(void* pointer) {
  std::lock_guard<std::recursive_mutex> guard(mutex);
  auto found = pinned.find(static_cast<char*>(pointer));
  if (found == pinned.end()) return pretended::failed(cudaErrorInvalidValue);
  munmap(pointer, found->second);
  pinned.erase(found);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  memset(attributes, 0, sizeof *attributes);
  attributes->device = pretended::current_device();
  Place place = pretended::place_of(pointer, &attributes->device);
  attributes->type = place == Place::device   ? cudaMemoryTypeDevice
                     : place == Place::pinned ? cudaMemoryTypeHost
                                              : cudaMemoryTypeUnregistered;
  if (place != Place::pageable) attributes->devicePointer = const_cast<void*>(pointer);
  if (place == Place::pinned) attributes->hostPointer = const_cast<void*>(pointer);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  move(to, from, bytes);
  note_copy(stream, to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  pretended::note(Kind::sync_stream, nullptr);
  return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                              cudaMemcpyKind, cudaStream_t stream) {
  for (size_t row = 0; row < height; row++) {
    auto* target = static_cast<char*>(to) + row * to_pitch;
    auto* source = static_cast<const char*>(from) + row * from_pitch;
    move(target, source, width);
    note_copy(stream, target, source, width);
  }
  return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}

cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream) {
  if (!dry() || bytes <= SMALL) memset(pointer, value, bytes);
  pretended::note(Kind::set, stream, reinterpret_cast<int64_t>(pointer), 0, static_cast<int64_t>(bytes));
  return cudaSuccess;
}

cudaError_t cudaMemset(void* pointer, int value, size_t bytes) { return cudaMemsetAsync(pointer, value, bytes, nullptr); }

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  *static_cast<uint64_t*>(value) = 0;
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
}
