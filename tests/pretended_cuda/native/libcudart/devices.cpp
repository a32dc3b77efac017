// Devices: an H100, or what the settings say, with the numbers that torch's choices of kernels depend on.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include "pretended.h"

namespace {

thread_local int current = 0;
thread_local cudaError_t last_error = cudaSuccess;

constexpr int WARP = 32;
constexpr int THREADS_PER_BLOCK = 1024, THREADS_PER_PROCESSOR = 2048, BLOCKS_PER_PROCESSOR = 32, REGISTERS = 65536;
constexpr int SHARED_PER_BLOCK = 49152, SHARED_PER_BLOCK_MOST = 232448, SHARED_PER_PROCESSOR = 233472;
constexpr int L2_BYTES = 52428800, BUS_BITS = 5120, CLOCK_KHZ = 1980000, MEMORY_CLOCK_KHZ = 2619000;
constexpr int VERSION = 13000;

int major() { return static_cast<int>(pretended::setting("PRETENDED_CUDA_MAJOR", 9)); }
int minor() { return static_cast<int>(pretended::setting("PRETENDED_CUDA_MINOR", 0)); }
int processors() { return static_cast<int>(pretended::setting("PRETENDED_CUDA_PROCESSORS", 132)); }

int attribute(cudaDeviceAttr which) {
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return THREADS_PER_BLOCK;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return SHARED_PER_BLOCK;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return SHARED_PER_BLOCK_MOST;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return SHARED_PER_PROCESSOR;
    case cudaDevAttrWarpSize: return WARP;
    case cudaDevAttrMultiProcessorCount: return processors();
    case cudaDevAttrComputeCapabilityMajor: return major();
    case cudaDevAttrComputeCapabilityMinor: return minor();
    case cudaDevAttrMaxThreadsPerMultiProcessor: return THREADS_PER_PROCESSOR;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return REGISTERS;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return BLOCKS_PER_PROCESSOR;
    case cudaDevAttrL2CacheSize: return L2_BYTES;
    case cudaDevAttrClockRate: return CLOCK_KHZ;
    case cudaDevAttrMemoryClockRate: return MEMORY_CLOCK_KHZ;
    case cudaDevAttrGlobalMemoryBusWidth: return BUS_BITS;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrConcurrentKernels: return 1;
    default: return 0;
  }
}

}  // namespace

int pretended::current_device() { return current; }
cudaError_t pretended::failed(cudaError_t error) { return last_error = error; }

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = pretended::device_count();
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= pretended::device_count()) return pretended::failed(cudaErrorInvalidDevice);
  current = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  memset(properties, 0, sizeof *properties);
  const char* name = getenv("PRETENDED_CUDA_NAME");
  snprintf(properties->name, sizeof properties->name, "%s", name ? name : "NVIDIA H100 80GB HBM3 (pretended)");
  properties->uuid.bytes[0] = static_cast<char>(device + 1);
  properties->pciBusID = device + 1;
  properties->major = major();
  properties->minor = minor();
  properties->multiProcessorCount = processors();
  properties->totalGlobalMem = pretended::device_bytes();
  properties->totalConstMem = 65536;
  properties->l2CacheSize = L2_BYTES;
  properties->memoryBusWidth = BUS_BITS;
  properties->memPitch = 2147483647;
  properties->textureAlignment = 512;
  properties->warpSize = WARP;
  properties->regsPerBlock = properties->regsPerMultiprocessor = REGISTERS;
  properties->sharedMemPerBlock = SHARED_PER_BLOCK;
  properties->sharedMemPerBlockOptin = SHARED_PER_BLOCK_MOST;
  properties->sharedMemPerMultiprocessor = SHARED_PER_PROCESSOR;
  properties->maxThreadsPerBlock = properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = THREADS_PER_BLOCK;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->maxThreadsPerMultiProcessor = THREADS_PER_PROCESSOR;
  properties->maxBlocksPerMultiProcessor = BLOCKS_PER_PROCESSOR;
  properties->asyncEngineCount = 3;
  properties->canMapHostMemory = properties->concurrentKernels = properties->unifiedAddressing = 1;
  properties->streamPrioritiesSupported = properties->managedMemory = properties->cooperativeLaunch = 1;
  properties->hostRegisterSupported = properties->memoryPoolsSupported = properties->clusterLaunch = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = attribute(which);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  snprintf(text, static_cast<size_t>(length), "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = reinterpret_cast<cudaMemPool_t>(1);
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

cudaError_t cudaDriverGetVersion(int* version) {
  *version = VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = VERSION;
  return cudaSuccess;
}

cudaError_t cudaPeekAtLastError() { return last_error; }

cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorPretended";
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "an error of the pretended runtime";
}

// Functions of the driver that torch asks for by name: for expandable segments, for Triton, and for some of its own.
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  *function = driver ? dlsym(driver, symbol) : nullptr;
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *function ? cudaSuccess : cudaErrorNotSupported;
}

// Called by the library of the driver (driver.cpp).
int pretended_take_bytes(int64_t bytes, int device) { return pretended::take(bytes, device) ? 0 : cudaErrorMemoryAllocation; }
void* pretended_reserve(size_t bytes, int device) { return pretended::reserve(bytes, device); }
}
