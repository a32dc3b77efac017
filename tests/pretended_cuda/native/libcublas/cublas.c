#include "vendor.h"

CREATES(cublasCreate_v2)
TELLS(cublasGetStatusString)

int cublasGetMathMode(void* handle, int* mode) {
  *mode = 0;
  return 0;
}

int cublasGetPointerMode_v2(void* handle, int* mode) {
  *mode = 0;
  return 0;
}
