// What torch 2.14 asks before it maps memory: no device is part of a fabric. Structures are left as torch cleared them.

#define NOT_SUPPORTED 3

int nvmlInit_v2(void) { return 0; }

int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** device) {
  static char handle;
  *device = &handle;
  return 0;
}

int nvmlDeviceGetGpuFabricInfoV(void* device, void* info) { return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void* device, unsigned link, int* type) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void* device, unsigned link, void* info) { return NOT_SUPPORTED; }
int nvmlDeviceGetComputeRunningProcesses(void* device, unsigned* count, void* processes) { return NOT_SUPPORTED; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { return NOT_SUPPORTED; }
