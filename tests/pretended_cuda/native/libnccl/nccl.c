#include "vendor.h"

TELLS(ncclGetErrorString)

const char* ncclGetLastError(void* communicator) { return "none"; }

int ncclGetVersion(int* version) {
  *version = 22809;
  return 0;
}

// What a communicator is doing: nothing, with success. Torch waits while it is in progress, when a job ends too.
int ncclCommGetAsyncError(void* communicator, int* state) {
  *state = 0;
  return 0;
}

int cudaMemcpyAsync(void* target, const void* source, size_t bytes, int kind, void* stream);

static size_t bytes_of(int type) {  // of an element: ncclDataType_t
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return sizes[type];
}

// Reads and writes on its stream as a sum over ranks does: the log has it as a copy.
int ncclAllReduce(const void* from, void* to, size_t count, int type, int op, void* communicator, void* stream) {
  return cudaMemcpyAsync(to, from, count * bytes_of(type), 3, stream);
}
