// The driver's library, as far as expandable segments, Triton and torch's loader of compiled kernels ask for it.
//
// Written without the driver's header: handles are pointers, enumerations are ints.
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

using Address = unsigned long long;
using Handle = void*;

constexpr int OUT_OF_MEMORY = 2, NOT_SUPPORTED = 801;
constexpr int FUNCTION_MAX_THREADS_PER_BLOCK = 0;  // CU_FUNC_ATTRIBUTE_...
constexpr size_t GRANULARITY = size_t{2} << 20;

struct Physical {  // memory of an expandable segment
  size_t bytes;
  int device;
};

struct AllocationProperties {  // the beginning of CUmemAllocationProp
  int type, handle_types;
  struct {
    int type, id;
  } location;
};

const Handle SOMETHING = reinterpret_cast<Handle>(1);  // a context, a module, a function: nobody looks inside

}  // namespace

extern "C" {

int cudaGetDevice(int*);
int cudaDeviceGetAttribute(int*, int, int);
int cudaGetDeviceCount(int*);
int pretended_take_bytes(int64_t, int);
void* pretended_reserve(size_t, int);
void pretended_launched(Handle stream);

int cuGetErrorString(int error, const char** text) {
  *text = error == OUT_OF_MEMORY ? "out of memory" : "an error of the pretended driver";
  return 0;
}

int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}

// ---- devices and contexts

int cuDeviceGet(int* device, int number) {
  *device = number;
  return 0;
}

int cuDeviceGetCount(int* count) { return cudaGetDeviceCount(count); }
int cuDeviceGetAttribute(int* value, int which, int device) { return cudaDeviceGetAttribute(value, which, device); }

int cuCtxGetCurrent(Handle* context) {
  *context = SOMETHING;
  return 0;
}

int cuCtxGetDevice(int* device) { return cudaGetDevice(device); }

int cuCtxGetLimit(size_t* value, int) {
  *value = 0;
  return 0;
}

int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}

int cuDevicePrimaryCtxRetain(Handle* context, int) {
  *context = SOMETHING;
  return 0;
}

int cuPointerGetAttribute(void* value, int, Address) {
  memset(value, 0, sizeof(Address));
  return 0;
}

// ---- expandable segments

int cuMemGetAllocationGranularity(size_t* bytes, const void*, int) {
  *bytes = GRANULARITY;
  return 0;
}

int cuMemAddressReserve(Address* address, size_t bytes, size_t, Address, Address) {
  int device = 0;
  cudaGetDevice(&device);
  *address = reinterpret_cast<Address>(pretended_reserve(bytes, device));
  return *address ? 0 : OUT_OF_MEMORY;
}

int cuMemCreate(Address* handle, size_t bytes, const AllocationProperties* properties, Address) {
  int device = properties->location.id;
  if (pretended_take_bytes(static_cast<int64_t>(bytes), device)) return OUT_OF_MEMORY;
  *handle = reinterpret_cast<Address>(new Physical{bytes, device});
  return 0;
}

int cuMemRelease(Address handle) {
  auto* physical = reinterpret_cast<Physical*>(handle);
  pretended_take_bytes(-static_cast<int64_t>(physical->bytes), physical->device);
  delete physical;
  return 0;
}

int cuMemGetAddressRange(Address*, size_t*, Address) { return NOT_SUPPORTED; }
int cuMemExportToShareableHandle(void*, Address, int, Address) { return NOT_SUPPORTED; }
int cuMemImportFromShareableHandle(Address*, void*, int) { return NOT_SUPPORTED; }
int cuMemRetainAllocationHandle(Address*, void*) { return NOT_SUPPORTED; }
int cuMemGetAllocationPropertiesFromHandle(void*, Address) { return NOT_SUPPORTED; }

int cuMemcpyDtoH_v2(void* to, Address from, size_t bytes) {
  memcpy(to, reinterpret_cast<void*>(from), bytes);
  return 0;
}

// ---- modules: they load, and their functions compute nothing

int cuModuleLoad(Handle* module, const char*) {
  *module = SOMETHING;
  return 0;
}

int cuModuleLoadData(Handle* module, const void*) {
  *module = SOMETHING;
  return 0;
}

int cuModuleLoadDataEx(Handle* module, const void*, unsigned, int*, void**) {
  *module = SOMETHING;
  return 0;
}

int cuModuleGetFunction(Handle* function, Handle, const char*) {
  *function = SOMETHING;
  return 0;
}

int cuModuleGetGlobal_v2(Address* address, size_t* bytes, Handle, const char*) {
  static char room[64];
  *address = reinterpret_cast<Address>(room);
  *bytes = sizeof room;
  return 0;
}

int cuFuncGetModule(Handle* module, Handle) {
  *module = SOMETHING;
  return 0;
}

int cuFuncGetAttribute(int* value, int which, Handle) {
  *value = which == FUNCTION_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return 0;
}

int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, Handle, int, size_t) {
  *count = 2;
  return 0;
}

int cuOccupancyMaxActiveClusters(int* count, Handle, const void*) {
  *count = 2;
  return 0;
}

int cuLinkCreate_v2(unsigned, int*, void**, Handle* state) {
  *state = SOMETHING;
  return 0;
}

int cuLinkComplete(Handle, void** binary, size_t* bytes) {
  static char nothing[8];
  *binary = nothing;
  *bytes = sizeof nothing;
  return 0;
}

struct LaunchConfiguration {  // the beginning of CUlaunchConfig
  unsigned grid[3], block[3], shared;
  Handle stream;
};

int cuLaunchKernel(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle stream, void**, void**) {
  pretended_launched(stream);
  return 0;
}

int cuLaunchCooperativeKernel(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle stream,
                              void**) {
  pretended_launched(stream);
  return 0;
}

int cuLaunchKernelEx(const LaunchConfiguration* configuration, Handle, void**, void**) {
  pretended_launched(configuration->stream);
  return 0;
}

// ---- what does nothing, and succeeds

#define SUCCEEDS(name) \
  int name() { return 0; }

SUCCEEDS(cuInit)
SUCCEEDS(cuCtxSetCurrent)
SUCCEEDS(cuCtxPushCurrent)
SUCCEEDS(cuCtxPopCurrent)
SUCCEEDS(cuCtxSetLimit)
SUCCEEDS(cuDevicePrimaryCtxRelease)
SUCCEEDS(cuMemAddressFree)
SUCCEEDS(cuMemMap)
SUCCEEDS(cuMemUnmap)
SUCCEEDS(cuMemSetAccess)
SUCCEEDS(cuMemsetD32Async)
SUCCEEDS(cuStreamWriteValue32)
SUCCEEDS(cuModuleUnload)
SUCCEEDS(cuFuncSetAttribute)
SUCCEEDS(cuFuncSetCacheConfig)
SUCCEEDS(cuLinkAddData_v2)
SUCCEEDS(cuTensorMapEncodeTiled)
SUCCEEDS(cuTensorMapEncodeIm2col)
}
