// What torch reads out of cuDNN. Plans of convolutions ask for PRETENDED_CUDNN_WORKSPACE bytes (4 MiB).
#include "vendor.h"

// of cudnnBackendAttributeType_t and cudnnBackendAttributeName_t
enum { NUMBER = 3, DESCRIPTOR = 15, PLAN_WORKSPACE_BYTES = 402 };

CREATES(cudnnCreate)
CREATES(cudnnCreateTensorDescriptor)
CREATES(cudnnCreateFilterDescriptor)
CREATES(cudnnCreateConvolutionDescriptor)
CREATES(cudnnCreateActivationDescriptor)
CREATES(cudnnCreateDropoutDescriptor)
CREATES(cudnnCreateRNNDescriptor)
CREATES(cudnnCreateRNNDataDescriptor)
CREATES(cudnnCreatePoolingDescriptor)
CREATES(cudnnCreateSpatialTransformerDescriptor)
CREATES(cudnnCreateCTCLossDescriptor)
TELLS(cudnnGetErrorString)

size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion(void) { return 13000; }

int cudnnGetProperty(int which, int* value) {
  int version[] = {CUDNN_VERSION / 10000, CUDNN_VERSION / 100 % 100, CUDNN_VERSION % 100};
  *value = version[which];
  return 0;
}

void cudnnGetLastErrorString(char* text, size_t length) {
  if (length) text[0] = 0;
}

int cudnnBackendCreateDescriptor(int type, void** made) {
  *made = calloc(1, 64);
  return 0;
}

static long long workspace(void) {
  const char* given = getenv("PRETENDED_CUDNN_WORKSPACE");
  return given ? atoll(given) : 4194304;
}

// One descriptor (an engine's configuration, a plan) and one number of each kind; no notes.
int cudnnBackendGetAttribute(void* descriptor, int name, int type, long long room, long long* count, void* values) {
  int known = type == DESCRIPTOR || type == NUMBER;
  if (count) *count = known;
  if (values && room > 0 && type == NUMBER) *(long long*)values = name == PLAN_WORKSPACE_BYTES ? workspace() : 0;
  return 0;
}

int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void* handle, int mode, int ops, void* x, void* z, void* y,
                                                             void* scale, void* activation, size_t* bytes) {
  *bytes = 0;
  return 0;
}

int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void* handle, int mode, int ops, void* activation, void* x,
                                                         size_t* bytes) {
  *bytes = 16;
  return 0;
}

int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void* handle, int mode, int ops, void* x, void* y, void* dy, void* dz,
                                                      void* dx, void* scale, void* activation, size_t* bytes) {
  *bytes = 0;
  return 0;
}
